"""Keys of rewards, with the top-level blocks that they stood in before they were gathered under ``reward``."""

from __future__ import annotations

from typing import Any

from hone.config.migration.entries import Changed, Entry, Foreign, Others, Refused, Renamed, Settled, Unsupported

_BUFFER = "reward.overlong_buffer"
_OLD_BUFFERS = (
    "{reward_model.overlong_buffer,reward.overlong_buffer_cfg,reward_model.reward_kwargs.overlong_buffer_cfg,"
    "reward.reward_kwargs.overlong_buffer_cfg,reward.reward_model.reward_kwargs.overlong_buffer_cfg}"
)

_IMPLICIT = "a reward model that is trained along with the policy (PRIME)"
_FROZEN = "a reward model of fixed weights, reward.reward_model.path"

_ENABLED = tuple(
    f"{block}.enable"
    for block in (
        "reward.overlong_buffer",
        "reward_model.overlong_buffer",
        "reward.overlong_buffer_cfg",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_model.reward_kwargs.overlong_buffer_cfg",
    )
)


def _manager(value: Any, others: Others) -> dict[str, Any]:
    """dapo punishes length here; there it did so only with the overlong buffer enabled."""
    if value in ("naive", "batch", "prime"):
        return {"reward.reward_manager": value}
    if value == "dapo":
        return {"reward.reward_manager": "dapo" if any(others.get(key) for key in _ENABLED) else "naive"}
    if value in ("gdpo", "remote", "rate_limited", None):
        return {}
    raise Refused(
        f"the reward manager {value}",
        "reward.custom_reward_function.path=FILE.py, called for each response in worker processes",
    )


def _source(value: Any, others: Others) -> dict[str, Any]:
    if value in ("register", None):
        return {}
    raise Refused("a reward manager of your own", "reward.custom_reward_function.path=FILE.py")


def _same_length(value: Any, others: Others) -> dict[str, Any]:
    limit = others.get("data.max_response_length")
    if value is None or limit is None or value == limit:
        return {}
    raise Refused(
        f"an overlong punishment up to {value} tokens, where responses may have {limit}",
        "data.max_response_length for both",
    )


_MANAGER = Changed(
    "the same names; gdpo, remote and rate_limited are what their keys ask of any manager",
    _manager,
    ("reward.reward_manager",),
)

ENTRIES: dict[str, Entry] = {
    "custom_reward_function.path": Renamed("reward.custom_reward_function.path"),
    "custom_reward_function.name": Renamed("reward.custom_reward_function.name"),
    "custom_reward_function.reward_kwargs": Renamed("reward.custom_reward_function.reward_kwargs"),
    "custom_reward_function.reward_kwargs.**": Renamed("reward.custom_reward_function.reward_kwargs.*"),
    "reward_model.enable": Renamed("reward.reward_model.enable"),
    "{reward_model.model.path,reward.reward_model.model_path,reward.reward_model.model.path}": Renamed(
        "reward.reward_model.path"
    ),
    "reward_model.num_workers": Renamed("reward.num_workers"),
    "reward_model.max_length": Settled("a reward model reads whole sequences"),
    "{reward_model,reward.reward_model}.{micro_batch_size,micro_batch_size_per_gpu,use_dynamic_bsz}": Settled(
        "micro-batches are packed by tokens up to reward.reward_model.max_token_len_per_gpu"
    ),
    "{reward_model.forward_max_token_len_per_gpu,reward_model.max_token_len_per_gpu}": Renamed(
        "reward.reward_model.max_token_len_per_gpu"
    ),
    "{reward_model.model,reward.reward_model.model}.input_tokenizer": Settled(
        "tokens go to the reward model as they are where the vocabularies agree, else through its own chat template"
    ),
    "{reward_model.model,reward.reward_model.model}.trust_remote_code": Settled("as for the policy"),
    "{reward_model.model,reward.reward_model.model}.{fsdp_config,override_config}.**": Settled(
        "the reward model is held as the policy is"
    ),
    "{reward_model,reward.reward_model}.strategy": Settled("the reward model is held as the policy is"),
    "{reward_model,reward.reward_model}.ulysses_sequence_parallel_size": Unsupported(
        "sequence parallelism of the reward model", "leave it out", (1, None)
    ),
    "reward_model.enable_resource_pool": Renamed("reward.reward_model.enable_resource_pool"),
    "reward_model.nnodes": Renamed("reward.reward_model.nnodes"),
    "reward_model.n_gpus_per_node": Renamed("reward.reward_model.n_gpus_per_node"),
    "{reward_model,reward.reward_model}.{rollout,megatron,profiler}.**": Foreign(
        "the reward model is run by the trainer, not by a generation engine"
    ),
    "reward_model.{launch_reward_fn_async,use_reward_loop,reward_loop_source,reward_loop_module_path}": Settled(
        "rewards are computed in worker processes while others are still being generated or scored"
    ),
    # managers
    "{reward_model.reward_manager,reward.reward_manager.name,reward_manager.name}": _MANAGER,
    "{reward_manager.source,reward.reward_manager.source,reward_model.reward_loop_class_name}": Changed(
        "managers are chosen by name", _source
    ),
    "{reward_manager.module,reward.reward_manager.module}.**": Unsupported(
        "a reward manager of your own", "reward.custom_reward_function.path=FILE.py"
    ),
    f"{_OLD_BUFFERS}.enable": Renamed(f"{_BUFFER}.enable"),
    f"{_OLD_BUFFERS}.len": Renamed(f"{_BUFFER}.len"),
    f"{_OLD_BUFFERS}.penalty_factor": Renamed(f"{_BUFFER}.penalty_factor"),
    f"{_OLD_BUFFERS}.log": Renamed(f"{_BUFFER}.log"),
    "{reward_model,reward,reward.reward_model}.reward_kwargs.max_resp_len": Changed(
        "is data.max_response_length", _same_length, ("data.max_response_length",)
    ),
    "{reward_model,reward}.reward_kwargs.**": Renamed("reward.custom_reward_function.reward_kwargs.*"),
    # services
    "{reward_model.sandbox_fusion,sandbox_fusion}.url": Renamed("reward.sandbox_fusion.url"),
    "{reward_model.sandbox_fusion,sandbox_fusion}.max_concurrent": Renamed("reward.sandbox_fusion.max_concurrent"),
    "{reward_model.sandbox_fusion,sandbox_fusion}.memory_limit_mb": Renamed("reward.sandbox_fusion.memory_limit_mb"),
    "reward.max_rpm": Renamed("reward.requests_per_minute"),
    "reward.{max_tpm,estimated_tokens_per_request}": Unsupported(
        "a limit on the tokens of a reward service", "reward.requests_per_minute bounds the calls"
    ),
    "reward_model.{param_offload,load_weight,profiler.**,nccl_timeout,scale_loss}": Foreign(
        "the reward model is held as the policy is"
    ),
    "reward_model.model.{update,beta_train,loss_type,ref_path,ref_type,optim.**}": Unsupported(_IMPLICIT, _FROZEN),
    "reward_model.{mini_batch_size,prime_granularity,prime_norm}": Unsupported(_IMPLICIT, _FROZEN),
    "algorithm.{reward_gt_coef,reward_dpo_coef}": Unsupported(_IMPLICIT, _FROZEN),
    "reward_model.timeout": Renamed("reward.timeout"),
}
