"""Keys of training: actor, reference and critic, and the backends that they may run on elsewhere."""

from __future__ import annotations

from typing import Any

from hone.config.migration.entries import Changed, Entry, Foreign, Others, Refused, Renamed, Settled, Unsupported
from hone.config.migration.reasons import KERNELS, MEGATRON, OTHER_BACKENDS, PACKED, PADDING, PROFILER

ACTOR, REF, ROLLOUT, CRITIC = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
    "critic",
)
_OTHER_ENGINES = "{actor_rollout_ref.ref.fsdp_config,critic.fsdp,critic.model.fsdp_config,critic.fsdp_config}"
_AS_ACTOR = "as for the actor, actor_rollout_ref.actor"
_TRAINED = "{actor_rollout_ref.actor,critic}"
_ROLES = "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}"
_ENGINES = (
    "{actor_rollout_ref.actor.fsdp_config,actor_rollout_ref.ref.fsdp_config,critic.fsdp,critic.model.fsdp_config}"
)


def _micro_batch(value: Any, others: Others) -> dict[str, Any]:
    """A micro-batch over all devices becomes one a device."""
    if value is None:
        return {}
    sizes = (value, others.get("trainer.nnodes", 1), others.get("trainer.n_gpus_per_node", 1))
    if not all(isinstance(size, int) for size in sizes):
        raise Refused(
            "a micro-batch over a number of devices that is not written here", "ppo_micro_batch_size_per_gpu=N"
        )
    return {f"{ACTOR}.ppo_micro_batch_size_per_gpu": max(1, value // max(1, sizes[1] * sizes[2]))}


def precision(path: str) -> Changed:
    """The compute dtype at ``path``, by any of its names."""
    names = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}

    def sets(value: Any, others: Others) -> dict[str, Any]:
        if value in names:
            return {path: names[value]}
        raise Refused(f"training in {value}", f"{path}=bfloat16 or float32", {path: "bfloat16"})

    return Changed("the dtype of forward and backward; parameters and optimizer state are float32", sets, (path,))


def _ratio_cap(value: Any, others: Others) -> dict[str, Any]:
    """Truncated importance sampling, as it was spelled before rollout correction."""
    if not isinstance(value, int | float) or value <= 0:
        return {}
    block = "algorithm.rollout_correction"
    return {f"{block}.rollout_is": "token", f"{block}.rollout_is_threshold": str(float(value))}


def contents(value: Any, others: Others) -> dict[str, Any]:
    """What a checkpoint is to hold."""
    wanted = set(value or []) - {"model", "optimizer", "extra", "hf_model"}
    if wanted:
        raise Refused(f"checkpoints with {', '.join(sorted(wanted))}", "leave it out")
    return {}


ALWAYS_WHOLE = (
    "a checkpoint holds weights as a Hugging Face directory, optimizer and everything that an exact resume needs"
)

ENTRIES: dict[str, Entry] = {
    # micro-batches
    f"{ACTOR}.ppo_micro_batch_size": Changed(
        "divided by the number of devices", _micro_batch, (f"{ACTOR}.ppo_micro_batch_size_per_gpu",)
    ),
    f"{_TRAINED}.use_dynamic_bsz": Settled(PACKED.format(budget="ppo_max_token_len_per_gpu")),
    f"{{{REF},{ROLLOUT}}}.log_prob_use_dynamic_bsz": Settled(PACKED.format(budget="a token budget")),
    f"{REF}.{{log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu}}": Settled(
        PACKED.format(budget="ref.log_prob_max_token_len_per_gpu")
    ),
    f"{ROLLOUT}.{{log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu,log_prob_max_token_len_per_gpu}}": Settled(
        PACKED.format(budget="actor.ppo_max_token_len_per_gpu")
    ),
    f"{CRITIC}.{{ppo_micro_batch_size,ppo_micro_batch_size_per_gpu}}": Settled(
        PACKED.format(budget="critic.ppo_max_token_len_per_gpu")
    ),
    f"{CRITIC}.{{forward_micro_batch_size,forward_micro_batch_size_per_gpu,forward_max_token_len_per_gpu}}": Settled(
        PACKED.format(budget="critic.ppo_max_token_len_per_gpu")
    ),
    f"{ACTOR}.{{ppo_infer_micro_batch_size_per_gpu,ppo_infer_max_token_len_per_gpu}}": Settled(
        PACKED.format(budget="actor.ppo_max_token_len_per_gpu")
    ),
    f"{_ROLES}.rollout_n": Settled("is actor_rollout_ref.rollout.n"),
    # the loss
    f"{ACTOR}.{{tis_imp_ratio_cap,behav_imp_weight_cap}}": Changed(
        "token-level importance weights, truncated at the value",
        _ratio_cap,
        ("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"),
    ),
    f"{ACTOR}.loss_mode": Renamed(f"{ACTOR}.policy_loss.loss_mode"),
    f"{ACTOR}.calculate_entropy": Settled("the entropy is always measured"),
    f"{ACTOR}.{{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,entropy_checkpointing}}": Settled(
        "entropy is always computed in pieces and recomputed in the backward pass"
    ),
    f"{ACTOR}.use_rollout_log_probs": Renamed("algorithm.rollout_correction.bypass_mode"),
    f"{ACTOR}.use_prefix_grouper": Settled("answers of a group may always share their prompt in a micro-batch"),
    f"{ACTOR}.{{data_loader_seed,seed}}": Settled("every random draw comes from trainer.seed"),
    f"{CRITIC}.data_loader_seed": Settled("every random draw comes from trainer.seed"),
    f"{CRITIC}.loss_scale_factor": Settled("is the actor's"),
    f"{CRITIC}.shuffle": Settled("is the actor's"),
    f"{ACTOR}.freeze_vision_tower": Foreign("concerns prompts with images, video or sound"),
    f"{ACTOR}.{{router_replay,qat}}.**": Unsupported(
        "router replay and training for quantized weights", "leave it out"
    ),
    f"{{{REF},{ROLLOUT},{CRITIC}}}.{{router_replay,qat}}.**": Unsupported(
        "router replay and training for quantized weights", "leave it out"
    ),
    # how it is computed
    f"{_ROLES}.use_torch_compile": Foreign(KERNELS),
    f"{_ENGINES}.use_torch_compile": Foreign(KERNELS),
    f"{_ENGINES}.{{use_orig_params,wrap_policy.**,forward_prefetch,model_dtype,grad_offload,forward_only}}": Foreign(
        "a setting of the first FSDP; sharding by parameter (fully_shard) needs none like it"
    ),
    f"{_ENGINES}.{{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,entropy_checkpointing}}": Settled(
        "entropy is always computed in pieces and recomputed in the backward pass"
    ),
    f"{_ENGINES}.{{pad_to_length,pad_to_length_bucket}}": Foreign(PADDING),
    f"{_ENGINES}.{{seed,full_determinism}}": Settled(
        "every random draw comes from trainer.seed, and runs repeat exactly"
    ),
    f"{_ENGINES}.{{qat,turbo_config}}.**": Unsupported("training for quantized weights", "leave it out"),
    f"{ACTOR}.fsdp_config.dtype": precision(f"{ACTOR}.dtype"),
    f"{_OTHER_ENGINES}.{{dtype,mixed_precision.param_dtype}}": Settled(_AS_ACTOR),
    f"{_ENGINES}.mixed_precision.buffer_dtype": Settled("buffers keep their dtype"),
    f"{_ENGINES}.strategy": Settled("is actor_rollout_ref.actor.strategy"),
    f"{{{REF},{CRITIC}}}.strategy": Settled(_AS_ACTOR),
    f"{_OTHER_ENGINES}.{{param_offload,optimizer_offload,offload_policy,fsdp_size,reshard_after_forward}}": Settled(
        _AS_ACTOR
    ),
    f"{_OTHER_ENGINES}.{{ulysses_sequence_parallel_size,mixed_precision.reduce_dtype}}": Settled(_AS_ACTOR),
    f"{{{REF},{CRITIC}}}.ulysses_sequence_parallel_size": Settled(_AS_ACTOR),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": Renamed(f"{ACTOR}.ulysses_sequence_parallel_size"),
    f"{ACTOR}.megatron.tensor_model_parallel_size": Renamed(f"{ACTOR}.tensor_model_parallel_size"),
    f"{ACTOR}.megatron.expert_model_parallel_size": Renamed(f"{ACTOR}.expert_parallel_size"),
    f"{ACTOR}.megatron.context_parallel_size": Renamed(f"{ACTOR}.ulysses_sequence_parallel_size"),
    f"{ACTOR}.megatron.{{pipeline_model_parallel_size,virtual_pipeline_model_parallel_size}}": Unsupported(
        "pipeline parallelism", "leave it out: what it divided is sharded by parameter (fully_shard)", (1, None)
    ),
    f"{ACTOR}.megatron.param_offload": Renamed(f"{ACTOR}.fsdp_config.param_offload"),
    f"{ACTOR}.megatron.optimizer_offload": Renamed(f"{ACTOR}.fsdp_config.optimizer_offload"),
    f"{_ROLES}.pad_to_length": Foreign(PADDING),
    f"{_ROLES}.megatron.**": Foreign(MEGATRON),
    f"{_ROLES}.{{veomni,torchtitan,automodel,veomni_config,torchtitan_config}}.**": Foreign(OTHER_BACKENDS),
    f"{_ROLES}.{{load_weight,scale_loss,ppo_megatron,enable_timers}}": Foreign(MEGATRON),
    f"{_ROLES}.{{profiler,profile}}.**": Foreign(PROFILER),
    f"{_ROLES}.profile_steps": Foreign(PROFILER),
    f"{_TRAINED}.checkpoint.{{save_contents,load_contents,contents}}": Changed(ALWAYS_WHOLE, contents),
    f"{_TRAINED}.checkpoint.{{strict,mbridge_config.**}}": Settled(ALWAYS_WHOLE),
    f"{_TRAINED}.checkpoint.async_save": Renamed("trainer.async_save"),
    f"{REF}.model.**": Unsupported(
        "a reference policy of other weights",
        "the reference is the policy's starting point, actor_rollout_ref.model.path",
    ),
    "actor_rollout_ref.hybrid_engine": Settled(
        "the policy is trained and sampled in one place", (True, None), "true: training and sampling in one place"
    ),
    "actor_rollout_ref.nccl_timeout": Foreign("a time limit of NCCL"),
    "critic.nccl_timeout": Foreign("a time limit of NCCL"),
    "model_engine": Foreign("chooses a training backend; there is one, see actor_rollout_ref.actor.strategy"),
}
