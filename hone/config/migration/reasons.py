"""Reasons that several tables give."""

MEGATRON = "a setting of Megatron, a training backend that is not used here"
OTHER_BACKENDS = "a setting of VeOmni, TorchTitan or AutoModel, training backends that are not used here"
ENGINE = "a setting of vLLM, SGLang or TensorRT-LLM that Hone does not pass on; rollout.engine_kwargs takes an engine's own arguments"
ENGINE_LAYOUT = (
    "how an external engine is spread over devices; here by rollout.tensor_model_parallel_size and rollout.num_replicas, and what else "
    "an engine has in rollout.engine_kwargs"
)
PROFILER = "a setting of a profiler of GPU kernels; every stage is timed as timing_s/<stage> in any run"
PADDING = "a setting of padded batches; sequences are packed, and no padding is computed"
KERNELS = "a choice between kernels that compute the same numbers"
NPU = "a setting for NPU devices"
STORAGE = "a service that the other trainer moves its batches through"
PACKED = "micro-batches are packed by tokens up to {budget}, and the loss, gradient and log-probs do not depend on how they are cut"
