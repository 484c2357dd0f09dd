"""Keys of the block ``rollout`` that concern engines in a process of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.fields import block, choice, number, texts
from hone.config.ray import OwnPoolConfig


@dataclass
class CheckpointEngineConfig:
    """How weights get to engines that have a copy."""

    backend: str = choice("auto", "auto", "shared_memory", "file", "socket")
    """Transport to an engine in another process: shared_memory (one machine), file (a temporary directory that both see), socket
    (slow, works everywhere); auto is shared_memory on one machine and socket to another."""
    update_weights_bucket_megabytes: int = number(512, low=1)
    """Weights on their way at a time, in MiB."""
    delta: bool = False
    """Send only the entries that changed since the version that the engine has, and check the whole by a checksum before it serves. For
    engines across a network, in bfloat16, where few entries change in an update; the engine's server keeps one more copy of the weights."""


@dataclass
class ServerPoolConfig:
    """How requests go to the replicas of an engine in processes of its own, and how replicas are looked after."""

    request_timeout: float | None = number(None, above=0)
    """Seconds that a request may take in a replica before another one gets it; null waits for ever."""
    max_attempts: int = number(5, low=1)
    """Times that a request is given to a replica, lost ones and late ones among them, before it fails."""
    max_queued_requests: int = number(65536, low=1)
    """Requests that may wait for a replica; who brings more waits until there is room."""
    health_check_period: float = number(5.0, above=0)
    """Seconds between two probes of a replica."""
    health_check_timeout: float = number(60.0, above=0)
    """Seconds that a replica may take to answer a probe before it counts as hung and is started again."""
    start_attempts: int = number(3, low=1)
    """Times in a row that a replica's start may fail before the replica is given up."""


@dataclass(kw_only=True)
class EngineConfig(OwnPoolConfig):
    """Engines in a process and an environment of their own."""

    num_replicas: int | None = number(None, low=1)
    """Replicas of the engine, each a process of its own, behind one queue; on Ray so many beside each worker of the rollout. null
    is one for vllm, and none for native, which then lives in the trainer's process. On a CPU they share the cores."""
    server_pool: ServerPoolConfig = block(ServerPoolConfig)
    """How requests go to the replicas, and how replicas are looked after."""
    engine_env: str | None = None
    """Virtual environment that the engine is installed in; null is where `hone engines install` puts it."""
    engine_url: Any = texts(None, "address")
    """Attach to a server that `hone engines serve` started, tcp://HOST:PORT, or to a list of them, each a replica (on Ray as many
    for each worker of the rollout), instead of starting them; their token is taken from the environment variable HONE_ENGINE_TOKEN."""
    engine_start_seconds: float = number(600.0, above=0)
    """Seconds that an engine's process may take to be ready."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine by its own names, which it checks itself: {vllm: {block_size: 16}}."""
    merge_lora: bool = True
    """With LoRA, work the adapter into the weights and send them all; false sends the adapter alone, and vLLM computes with it: little
    to send, and slower sampling."""
    tensor_model_parallel_size: int = number(1, low=1)
    """Processes (on GPUs: devices) that an engine divides the model over."""
    expert_parallel_size: int = number(1, low=1)
    """Divide the experts of a mixture over these processes instead of the matrices of each: 1, or tensor_model_parallel_size, as the
    experts lie on the same processes as everything else."""
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
