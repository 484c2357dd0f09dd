"""Models that strategy=fsdp2 divides into pipeline stages; readable before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.errors import ModelError

SIZE_KEY = "actor_rollout_ref.actor.pipeline_model_parallel_size"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "olmo2")
"""Values of ``model_type`` whose decoders are embedding, layers and norm, and compute nothing else with their input."""


def require_divisible(settings: Mapping[str, Any], stages: int, path: str, key: str = SIZE_KEY) -> None:
    """Raise ModelError if a model has fewer layers than stages, or is of a family that is not supported."""
    family, layers = settings.get("model_type"), settings.get("num_hidden_layers")
    if family not in FAMILIES:
        raise ModelError(
            f"'{path}' is a model of type {family}, which strategy=fsdp2 does not divide into pipeline stages",
            why=f"the stages are written for {', '.join(FAMILIES)}",
            where=key,
            fix=f"{key}=1",
        )
    if layers is not None and layers < stages:
        raise ModelError(
            f"'{path}' has {layers} layers, fewer than the {stages} stages of {key}",
            why="every stage has at least one layer",
            where=key,
            fix=f"{key}=<at most {layers}>",
        )
