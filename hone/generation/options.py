"""Keys of ``rollout`` as arguments of an engine in a process of its own, by the engine's own names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hone.config.rollout import RolloutConfig
from hone.errors import ConfigError


def engine_options(rollout: RolloutConfig) -> dict[str, Any]:
    """Arguments of the engine that ``rollout.name`` names; ``engine_kwargs`` win, and what is None is left to the engine.

    Raises:
        ConfigError: engine_kwargs has arguments for another engine.
    """
    others = sorted(set(rollout.engine_kwargs) - {rollout.name})
    if others:
        raise ConfigError(
            f"rollout.engine_kwargs has arguments for '{others[0]}', and the engine is '{rollout.name}'",
            why="nothing would read them",
            fix=f"actor_rollout_ref.rollout.engine_kwargs={{{rollout.name}: {{...}}}}",
            where="actor_rollout_ref.rollout.engine_kwargs",
        )
    own = rollout.engine_kwargs.get(rollout.name) or {}
    return {**{name: value for name, value in _OPTIONS[rollout.name](rollout).items() if value is not None}, **own}


def _vllm(rollout: RolloutConfig) -> dict[str, Any]:
    return {
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": rollout.enforce_eager,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
    }


def _sglang(rollout: RolloutConfig) -> dict[str, Any]:
    """SGLang cuts prompts by a size of the pieces, of which -1 means none."""
    pieces = rollout.max_num_batched_tokens if rollout.enable_chunked_prefill in (None, True) else -1
    return {
        "tp_size": rollout.tensor_model_parallel_size,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        "chunked_prefill_size": pieces,
        "disable_cuda_graph": rollout.enforce_eager,
    }


def _native(rollout: RolloutConfig) -> dict[str, Any]:
    """Hone's own engine takes no further arguments."""
    return {}


_OPTIONS: dict[str, Callable[[RolloutConfig], dict[str, Any]]] = {"vllm": _vllm, "sglang": _sglang, "native": _native}
