"""Keys of the block ``rollout`` that concern engines in a process of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.fields import block, choice, number
from hone.config.ray import OwnPoolConfig


@dataclass
class CheckpointEngineConfig:
    """How weights get to engines that have a copy."""

    backend: str = choice("auto", "auto", "shared_memory", "file", "socket")
    """Transport to an engine in another process: shared_memory (one machine), file (a temporary directory that both see), socket
    (slow, works everywhere); auto is shared_memory on one machine and socket to another."""
    update_weights_bucket_megabytes: int = number(512, low=1)
    """Weights on their way at a time, in MiB."""


@dataclass(kw_only=True)
class EngineConfig(OwnPoolConfig):
    """Engines in a process and an environment of their own."""

    engine_env: str | None = None
    """Virtual environment that the engine is installed in; null is where `hone engines install` puts it."""
    engine_url: str | None = None
    """Attach to a server that `hone engines serve` started, tcp://HOST:PORT, instead of starting one; its token is taken from the
    environment variable HONE_ENGINE_TOKEN."""
    engine_start_seconds: float = number(600.0, above=0)
    """Seconds that an engine's process may take to be ready."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine by its own names, which it checks itself: {vllm: {block_size: 16}}."""
    tensor_model_parallel_size: int = number(1, low=1)
    """Processes (on GPUs: devices) that an engine divides the model over."""
    gpu_memory_utilization: float = number(0.5, above=0, high=1)
    """Share of a GPU's memory that the engine takes for weights and cache. On a CPU max_cache_tokens bounds the cache."""
    max_num_batched_tokens: int | None = number(None, low=1)
    """Most tokens in one forward pass of the engine; null leaves it to the engine."""
    enforce_eager: bool | None = None
    """Run without compiled graphs; null is true on a CPU, where compiling takes longer than it saves, and false on a GPU."""
    enable_chunked_prefill: bool | None = None
    """Whether the engine may cut long prompts in pieces between decode steps; null leaves it to the engine."""
    enable_prefix_caching: bool = True
    """Whether the engine keeps what it computed of prompts for requests that begin alike. It forgets it with every update."""
    checkpoint_engine: CheckpointEngineConfig = block(CheckpointEngineConfig)
    """How weights get to engines that have a copy."""
