"""Generation: the engine protocol, the native engine, its reference implementation, and engines in separate processes."""

from __future__ import annotations

from collections.abc import Callable

from hone.config.engines import SERVED
from hone.config.rollout import RolloutConfig
from hone.generation.protocol import Engine
from hone.registry import Registry

__all__ = ["ENGINES", "SERVED", "Engine", "is_served"]

ENGINES: Registry[Callable[..., Engine]] = Registry("engine", key="actor_rollout_ref.rollout.name")
"""Engine factories: ``(model, tokenizer, device, dtype, max_num_seqs, max_cache_tokens, max_model_len) -> Engine``."""
ENGINES.register_later("hone.generation.native.engine", "native")
ENGINES.register_later("hone.generation.hf", "hf")


def is_served(rollout: RolloutConfig) -> bool:
    """Return whether the engine runs in separate processes, with a copy of the weights."""
    return rollout.name in SERVED or rollout.num_replicas is not None
