"""Keys of the block ``rollout`` about engines in separate processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.fields import block, choice, number, texts
from hone.config.run import OwnPoolConfig

SERVED = ("vllm", "sglang", "trtllm")
"""Engines that run as servers in a separate environment; :mod:`hone.generation.build` starts them."""


@dataclass
class CheckpointEngineConfig:
    """Weight sync to engines that hold a copy."""

    backend: str = choice("auto", "auto", "cuda_ipc", "shared_memory", "file", "socket")
    """Transport to an engine in another process: cuda_ipc (weights stay on the GPU that trainer and engine share), shared_memory (one
    machine), file (a temporary directory that both can access), socket (slow, works everywhere). auto is the first of cuda_ipc,
    shared_memory and socket that works. cuda_ipc goes through shared_memory, with a warning, where the engine has another GPU."""
    between_workers: str = choice("auto", "auto", "object_store", "broadcast")
    """On Ray, way of the weights from the actor to rollout workers with devices of their own: broadcast (NCCL between GPUs, gloo between
    CPUs) or object_store (through the memory of every node); auto is broadcast if every worker has a GPU of its own."""
    update_weights_bucket_megabytes: int = number(512, low=1)
    """Weights sent at a time, in MiB."""
    delta: bool = False
    """Send only the entries that changed since the engine's version, and verify all weights by a checksum. For engines across a
    network, in bfloat16, where few entries change per update; the engine's server keeps one more copy of the weights."""


@dataclass
class ServerPoolConfig:
    """The queue of an engine's replicas, and their health checks."""

    request_timeout: float | None = number(None, above=0)
    """Time limit of a request in a replica in seconds, after which another replica gets it; null means no limit."""
    max_attempts: int = number(5, low=1)
    """Attempts of a request, including lost and late ones, before it fails."""
    max_queued_requests: int = number(65536, low=1)
    """Capacity of the queue of requests; when it is full, callers wait."""
    health_check_period: float = number(5.0, above=0)
    """Seconds between two probes of a replica."""
    health_check_timeout: float = number(60.0, above=0)
    """Time limit of a probe in seconds, after which a replica counts as hung and is restarted."""
    start_attempts: int = number(3, low=1)
    """Failed starts of a replica in a row after which it is not started again."""


@dataclass(kw_only=True)
class ServedConfig:
    """Engines in separate processes and environments."""

    num_replicas: int | None = number(None, low=1)
    """Replicas of the engine behind one queue, each in a separate process; on Ray this many per rollout worker. null means one for
    vllm, and none for native, which then runs in the trainer's process. On a CPU replicas share the cores."""
    server_pool: ServerPoolConfig = block(ServerPoolConfig)
    """The queue of the replicas, and their health checks."""
    engine_env: str | None = None
    """Virtual environment of the engine; null means the one that `hone engines install` creates."""
    engine_url: Any = texts(None, "address")
    """Attach to a server started by `hone engines serve`, tcp://HOST:PORT, or to a list of them, each a replica (on Ray this many
    per rollout worker), instead of starting engines. The environment variable HONE_ENGINE_TOKEN holds their token."""
    engine_start_seconds: float = number(600.0, above=0)
    """Time limit of an engine's start in seconds."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine by its own names, which the engine checks: {vllm: {block_size: 16}}."""
    tensor_model_parallel_size: int = number(1, low=1)
    """Processes (on GPUs: devices) that share one copy of an engine's model. On Ray an engine has the devices of
    tensor_model_parallel_size x data_parallel_size workers of one node, and the first of them starts it."""
    data_parallel_size: int = number(1, low=1)
    """Copies of the model in one engine (vllm, sglang), which distributes its requests over them. Engines of their own
    (num_replicas, more workers) do the same for dense models; experts can be divided over the copies of one engine."""
    expert_parallel_size: int = number(1, low=1)
    """Distribute whole experts over these processes instead of sharding each: 1, or tensor_model_parallel_size x
    data_parallel_size, because the same processes hold the rest of the model."""
    devices: list[int] = field(default_factory=list)
    """GPUs of the engines with trainer.runtime=local, by their numbers in torch: [1, 2, 3, 4]; each replica takes the next ones. Empty
    means the visible ones from the last to the first, which trains. On Ray every engine has the GPUs of its workers."""
    gpu_memory_utilization: float = number(0.5, above=0, high=1)
    """Share of a GPU's memory that the engine uses for weights and KV cache; the native engine in the trainer's process counts the
    trainer's weights. On a CPU max_cache_tokens limits the KV cache."""
    max_num_batched_tokens: int | None = number(None, low=1)
    """Most tokens in one forward pass of the engine; null leaves it to the engine."""
    enforce_eager: bool | None = None
    """Run without compiled graphs; null means true on a CPU, where compiling takes longer than it saves, and false on a GPU."""
    enable_chunked_prefill: bool | None = None
    """Allow the engine to split long prompts into chunks between decode steps; null leaves it to the engine."""
    enable_prefix_caching: bool = True
    """Keep the KV cache of prompts for requests with the same prefix. Every weight update clears it."""

    @property
    def devices_per_engine(self) -> int:
        return self.tensor_model_parallel_size * self.data_parallel_size


@dataclass(kw_only=True)
class EngineConfig(ServedConfig, OwnPoolConfig):
    """Engines of the policy, whose weights change."""

    merge_lora: bool = True
    """With LoRA, merge the adapter into the weights and send them all; false sends only the adapter, and vLLM applies it: less to
    send, but slower sampling."""
    free_cache_engine: bool | None = None
    """Free the engine's memory while the policy trains: its KV cache, and its weights, which the next weight sync replaces. null means
    true when engines share GPUs with training and take turns with it."""
    checkpoint_engine: CheckpointEngineConfig = block(CheckpointEngineConfig)
    """Weight sync to engines that hold a copy."""


@dataclass(kw_only=True)
class JudgeEngineConfig(ServedConfig):
    """The engine of a reward model, whose weights are frozen."""

    name: str = choice("native", "native", *SERVED)
    """Engine: native (in the process of the reward model, or with num_replicas in separate ones), vllm, sglang or trtllm (in separate
    environments, see docs/engines.md). With kind=discriminative, native computes scores without an engine, and vllm with one."""
    max_num_seqs: int = number(256, low=1)
    """Most answers judged at once."""
    max_cache_tokens: int | None = number(None, low=1)
    """Capacity of the KV cache in tokens; null means max_token_len_per_gpu for native, and the other engines' own choice."""
    dtype: str = choice("auto", "auto", "float32", "bfloat16", "float16")
    """Compute dtype; auto means the actor's."""
