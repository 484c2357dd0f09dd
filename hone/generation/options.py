"""Translation of ``rollout`` keys to the arguments of a served engine, by the engine's names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.config.model import ModelConfig
from hone.config.rollout import RolloutConfig
from hone.config.tree import RLConfig
from hone.errors import ConfigError


def engine_options(rollout: RolloutConfig) -> dict[str, Any]:
    """Return the arguments of the engine ``rollout.name``. ``engine_kwargs`` win; for None the engine has its default.

    Raises:
        ConfigError: engine_kwargs has arguments for another engine, or the parallel sizes do not fit.
    """
    others = sorted(set(rollout.engine_kwargs) - {rollout.name})
    if others:
        raise ConfigError(
            f"rollout.engine_kwargs has arguments for '{others[0]}', but the engine is '{rollout.name}'",
            why="the engine would ignore them",
            fix=f"actor_rollout_ref.rollout.engine_kwargs={{{rollout.name}: {{...}}}}",
            where="actor_rollout_ref.rollout.engine_kwargs",
        )
    tensor, expert = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    if expert not in (1, tensor):
        raise ConfigError(
            f"rollout.expert_parallel_size={expert}, but rollout.tensor_model_parallel_size={tensor}",
            why="engines divide experts over the same processes as the model",
            fix=f"actor_rollout_ref.rollout.expert_parallel_size={tensor}, or tensor_model_parallel_size={expert}",
            where="actor_rollout_ref.rollout.expert_parallel_size",
        )
    user_options = rollout.engine_kwargs.get(rollout.name) or {}
    return _merge(_OPTIONS[rollout.name](rollout), user_options)


def _merge(options: dict[str, Any], user_options: dict[str, Any]) -> dict[str, Any]:
    """Return Hone's arguments overridden by the user's; dictionaries are merged key by key."""
    both = [
        name for name, value in user_options.items() if isinstance(value, dict) and isinstance(options.get(name), dict)
    ]
    return {**options, **user_options, **{name: {**options[name], **user_options[name]} for name in both}}


def _without_none(**options: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _vllm(rollout: RolloutConfig) -> dict[str, Any]:
    return _without_none(
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        enable_expert_parallel=rollout.expert_parallel_size > 1 or None,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enable_prefix_caching=rollout.enable_prefix_caching,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enforce_eager=rollout.enforce_eager,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
    )


def _sglang(rollout: RolloutConfig) -> dict[str, Any]:
    """Return SGLang's arguments; -1 as the size of prefill chunks disables chunking."""
    chunk_size = rollout.max_num_batched_tokens if rollout.enable_chunked_prefill in (None, True) else -1
    return _without_none(
        tp_size=rollout.tensor_model_parallel_size,
        ep_size=rollout.expert_parallel_size if rollout.expert_parallel_size > 1 else None,
        mem_fraction_static=rollout.gpu_memory_utilization,
        disable_radix_cache=not rollout.enable_prefix_caching,
        max_prefill_tokens=rollout.max_num_batched_tokens,
        chunked_prefill_size=chunk_size,
        disable_cuda_graph=rollout.enforce_eager,
    )


def _trtllm(rollout: RolloutConfig) -> dict[str, Any]:
    """Return TensorRT-LLM's arguments; its memory fraction counts free memory, and a null disables CUDA graphs."""
    return {
        **_without_none(
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            moe_expert_parallel_size=rollout.expert_parallel_size if rollout.expert_parallel_size > 1 else None,
            max_num_tokens=rollout.max_num_batched_tokens,
            enable_chunked_prefill=rollout.enable_chunked_prefill,
        ),
        **({"cuda_graph_config": None} if rollout.enforce_eager else {}),
        "kv_cache_config": {
            "free_gpu_memory_fraction": rollout.gpu_memory_utilization,
            "enable_block_reuse": rollout.enable_prefix_caching,
        },
    }


def _native(rollout: RolloutConfig) -> dict[str, Any]:
    """Return no arguments: the native engine has none."""
    return {}


_OPTIONS: dict[str, Callable[[RolloutConfig], dict[str, Any]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "native": _native,
}


def has_adapter(config: RLConfig) -> bool:
    """Return whether the run trains an adapter."""
    shared = config.actor_rollout_ref.model
    return shared.lora_rank > 0 or shared.lora_adapter_path is not None


def sends_adapter(config: RLConfig) -> bool:
    """Return whether a weight sync sends only the adapter, unmerged (``rollout.merge_lora=false``)."""
    return not config.actor_rollout_ref.rollout.merge_lora and has_adapter(config)


def adapter_shape(config: RLConfig) -> dict[str, float] | None:
    """Return rank and scale of the adapter that the engine loads; None for whole weights.

    Raises:
        ConfigError: the engine takes no adapters, or not one of this kind.
    """
    rollout = config.actor_rollout_ref.rollout
    if not sends_adapter(config):
        return None
    if rollout.name != "vllm" or rollout.engine_url is not None:
        raise ConfigError(
            f"engine '{rollout.name}'{' at engine_url' if rollout.engine_url else ''} takes no adapters, but rollout.merge_lora=false",
            why="only a vLLM started by the run computes with an unmerged adapter",
            fix="actor_rollout_ref.rollout.merge_lora=true",
            where="actor_rollout_ref.rollout.merge_lora",
        )
    return _shape(config.actor_rollout_ref.model)


def _shape(model: ModelConfig) -> dict[str, float]:
    if model.lora_adapter_path is None:
        return {"r": model.lora_rank, "lora_alpha": model.lora_alpha}
    file = Path(model.lora_adapter_path, "adapter_config.json")
    if not file.is_file():
        raise ConfigError(
            f"'{model.lora_adapter_path}' is not an adapter: {file.name} is missing",
            fix="actor_rollout_ref.model.lora_adapter_path=DIR of a PEFT adapter",
            where="actor_rollout_ref.model.lora_adapter_path",
        )
    saved = json.loads(file.read_text())
    unusual = [name for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if saved.get(name)]
    if unusual:
        raise ConfigError(
            f"the adapter in '{model.lora_adapter_path}' has {unusual[0]}",
            why="its scale is not lora_alpha / r, which the engine assumes",
            fix="actor_rollout_ref.rollout.merge_lora=true",
            where="actor_rollout_ref.rollout.merge_lora",
        )
    return {"r": saved["r"], "lora_alpha": saved["lora_alpha"]}
