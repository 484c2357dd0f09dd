"""Keys of ``rollout`` as arguments of an engine in a process of its own, by the engine's own names."""

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
    """Arguments of the engine that ``rollout.name`` names; ``engine_kwargs`` win, and what is None is left to the engine.

    Raises:
        ConfigError: engine_kwargs has arguments for another engine, or the sizes do not fit.
    """
    others = sorted(set(rollout.engine_kwargs) - {rollout.name})
    if others:
        raise ConfigError(
            f"rollout.engine_kwargs has arguments for '{others[0]}', and the engine is '{rollout.name}'",
            why="nothing would read them",
            fix=f"actor_rollout_ref.rollout.engine_kwargs={{{rollout.name}: {{...}}}}",
            where="actor_rollout_ref.rollout.engine_kwargs",
        )
    tensor, expert = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    if expert not in (1, tensor):
        raise ConfigError(
            f"rollout.expert_parallel_size={expert}, and rollout.tensor_model_parallel_size={tensor}",
            why="engines divide experts over the very processes that they divide the model over",
            fix=f"actor_rollout_ref.rollout.expert_parallel_size={tensor}, or tensor_model_parallel_size={expert}",
            where="actor_rollout_ref.rollout.expert_parallel_size",
        )
    own = rollout.engine_kwargs.get(rollout.name) or {}
    return _over(_OPTIONS[rollout.name](rollout), own)


def _over(options: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The user's arguments over Hone's; a group of arguments is laid over another one by one."""
    both = [name for name in own if isinstance(own[name], dict) and isinstance(options.get(name), dict)]
    return {**options, **own, **{name: {**options[name], **own[name]} for name in both}}


def _told(**options: Any) -> dict[str, Any]:
    """Those that are not left to the engine."""
    return {name: value for name, value in options.items() if value is not None}


def _vllm(rollout: RolloutConfig) -> dict[str, Any]:
    return _told(
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        enable_expert_parallel=rollout.expert_parallel_size > 1 or None,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enable_prefix_caching=rollout.enable_prefix_caching,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enforce_eager=rollout.enforce_eager,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
    )


def _sglang(rollout: RolloutConfig) -> dict[str, Any]:
    """SGLang cuts prompts by a size of the pieces, of which -1 means none."""
    pieces = rollout.max_num_batched_tokens if rollout.enable_chunked_prefill in (None, True) else -1
    return _told(
        tp_size=rollout.tensor_model_parallel_size,
        ep_size=rollout.expert_parallel_size if rollout.expert_parallel_size > 1 else None,
        mem_fraction_static=rollout.gpu_memory_utilization,
        disable_radix_cache=not rollout.enable_prefix_caching,
        max_prefill_tokens=rollout.max_num_batched_tokens,
        chunked_prefill_size=pieces,
        disable_cuda_graph=rollout.enforce_eager,
    )


def _trtllm(rollout: RolloutConfig) -> dict[str, Any]:
    """TensorRT-LLM takes its share of the memory that the weights leave free; without CUDA graphs it is told so by a null."""
    return {
        **_told(
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
    """Hone's own engine takes no further arguments."""
    return {}


_OPTIONS: dict[str, Callable[[RolloutConfig], dict[str, Any]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "native": _native,
}


def has_adapter(config: RLConfig) -> bool:
    """Whether what is trained is an adapter."""
    shared = config.actor_rollout_ref.model
    return shared.lora_rank > 0 or shared.lora_adapter_path is not None


def sends_adapter(config: RLConfig) -> bool:
    """Whether an update sends the adapter alone, and the engine computes with it (``rollout.merge_lora=false``)."""
    return not config.actor_rollout_ref.rollout.merge_lora and has_adapter(config)


def adapter_shape(config: RLConfig) -> dict[str, float] | None:
    """Rank and scale of the adapter that the engine is to take; None for whole weights.

    Raises:
        ConfigError: the engine takes no adapters, or not one of this kind.
    """
    rollout = config.actor_rollout_ref.rollout
    if not sends_adapter(config):
        return None
    if rollout.name != "vllm" or rollout.engine_url is not None:
        raise ConfigError(
            f"engine '{rollout.name}'{' at engine_url' if rollout.engine_url else ''} takes no adapters, and rollout.merge_lora=false",
            why="only a vLLM that the run starts itself computes with an adapter apart from the weights",
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
            f"there is no adapter in '{model.lora_adapter_path}': {file.name} is missing",
            fix="actor_rollout_ref.model.lora_adapter_path=DIR of a PEFT adapter",
            where="actor_rollout_ref.model.lora_adapter_path",
        )
    saved = json.loads(file.read_text())
    unusual = [name for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if saved.get(name)]
    if unusual:
        raise ConfigError(
            f"the adapter in '{model.lora_adapter_path}' has {unusual[0]}",
            why="its scale is not lora_alpha / r, which is what is sent to the engine",
            fix="actor_rollout_ref.rollout.merge_lora=true",
            where="actor_rollout_ref.rollout.merge_lora",
        )
    return {"r": saved["r"], "lora_alpha": saved["lora_alpha"]}
