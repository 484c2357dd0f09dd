"""Sharding of a model over the processes of its group: keys of ``actor_rollout_ref.actor``, and of the root of the offline trees; and the
layout over the processes of a pool that follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hone.config.fields import block, choice, named, number
from hone.errors import ConfigError


@dataclass
class MixedPrecisionConfig:
    """Dtypes of FSDP's communication."""

    param_dtype: str | None = choice(None, "float32", "bfloat16", "float16")
    """Dtype of all-gathered parameters and of computation; null means the compute dtype of the model
    (dtype). The shards stay float32."""
    reduce_dtype: str = choice("float32", "float32", "bfloat16")
    """Dtype in which gradients are summed over ranks."""


@dataclass
class FsdpConfig:
    """Fully sharded data parallel: shards of parameters, gradients and optimizer state."""

    fsdp_size: int = -1
    """Ranks over which one copy of the parameters is sharded; -1 means all. A smaller number makes copies (hybrid sharding):
    gradients are summed within a copy, then between copies, for nodes with a slow network between them."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass and gather them again in the backward pass: less memory,
    50 % more communication."""
    offload_policy: bool = False
    """Keep shards of parameters, gradients and optimizer state in the host's memory and update them there. A last resort when
    memory is short: each layer is copied to the device when it is needed."""
    param_offload: bool = False
    """Keep the shards of parameters in the host's memory while the model is not in use; they are on the device during
    passes and updates."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in the host's memory except during the optimizer's step."""
    mixed_precision: MixedPrecisionConfig = block(MixedPrecisionConfig)
    """Dtypes of communication."""


@dataclass
class ParallelConfig:
    """The training backend and the parallel sizes. The sizes multiplied must divide the number of processes; the remaining
    factor is data parallel."""

    block_path: ClassVar[str] = ""
    """Path of the block in its tree; empty for the root."""

    def key(self, name: str) -> str:
        """Return the full key of a field of this block, for messages."""
        return f"{self.block_path}.{name}" if self.block_path else name

    strategy: str | None = named(None, "training backend")
    """The training backend. local: one process holds the whole model; fsdp2 (or fsdp): the model is sharded over the processes;
    megatron: the layers of Megatron-core (extra megatron; see docs/cluster.md). null means local for one process, fsdp2 for more. A
    custom backend has an import path (my_backend:MyBackend); see docs/extending.md. torchtitan is not supported yet."""
    tensor_model_parallel_size: int = number(1, low=1)
    """Ranks that share every matrix of a layer, according to the model's tensor-parallel plan. They process the same sequences;
    heads must divide."""
    pipeline_model_parallel_size: int = number(1, low=1)
    """Stages of consecutive layers, each on other ranks; micro-batches pass through them one after the other. With fsdp2 or
    megatron; with megatron the number of layers must divide."""
    ulysses_sequence_parallel_size: int = number(1, low=1)
    """Ranks that share the tokens of a micro-batch, and the heads in attention, for contexts too long for one device. The heads
    must divide."""
    context_parallel_size: int = number(1, low=1)
    """Ranks that share the tokens of a micro-batch, in attention too, where keys and values travel round the ranks (ring attention).
    Any number of heads will do. With ulysses_sequence_parallel_size both multiply. Only with strategy=fsdp2."""
    expert_parallel_size: int = number(1, low=1)
    """Ranks that share the experts of a mixture-of-experts layer; tokens are sent to their experts. It must divide the data,
    context and sequence parallel ranks."""
    fsdp_config: FsdpConfig = block(FsdpConfig)
    """Sharding and offloading."""


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of a pool, as plain numbers; nothing is started or allocated.

    Ranks that communicate most have neighbouring numbers. For example, 8 ranks with tensor 2 and sequence 2 have two different
    shards of a batch, ranks 0-3 the first, 4-7 the second. :mod:`hone.training.layout` builds the process groups.

    Raises ConfigError: the sizes do not multiply to ``world``.
    """

    world: int = 1  # number of ranks
    dp_replicate: int = 1  # copies of the parameters
    dp_shard: int = 1  # data-parallel ranks over which one copy is sharded
    sequence: int = 1  # ranks that share the tokens of a row (Ulysses)
    tensor: int = 1  # ranks that share every matrix
    expert: int = 1  # ranks that share the experts
    pipeline: int = 1  # stages of layers
    context: int = 1  # ranks that share the tokens of a row, in attention too (ring)

    def __post_init__(self) -> None:
        if self.dp_size * self.ranks_a_shard != self.world:
            raise ConfigError(
                f"{self.dp_replicate} copies x {self.dp_shard} data x {self.pipeline} pipeline x {self.context} context "
                f"x {self.sequence} sequence x {self.tensor} tensor parallel ranks are not {self.world} processes"
            )

    @classmethod
    def plan(cls, world: int, config: ParallelConfig) -> Layout:
        """Return the layout of ``world`` processes; data parallelism uses the remaining factor.

        Raises ConfigError: a size does not divide; the message has the numbers.
        """
        tensor, sequence = config.tensor_model_parallel_size, config.ulysses_sequence_parallel_size
        pipeline, context = config.pipeline_model_parallel_size, config.context_parallel_size
        expert, shard = config.expert_parallel_size, config.fsdp_config.fsdp_size
        if world % (tensor * sequence * context * pipeline):
            sizes = f"{tensor} tensor x {sequence} sequence"
            sizes += (f" x {context} context" if context > 1 else "") + (
                f" x {pipeline} pipeline" if pipeline > 1 else ""
            )
            keys = ["tensor_model_parallel_size", "ulysses_sequence_parallel_size"]
            keys += ["context_parallel_size"] * (context > 1) + ["pipeline_model_parallel_size"] * (pipeline > 1)
            raise ConfigError(
                f"{world} processes cannot be divided into groups of {sizes} parallel ranks",
                why="every process must be in exactly one such group",
                where=config.key("tensor_model_parallel_size"),
                fix=f"{' x '.join(map(config.key, keys))} must divide {world} = trainer.nnodes x trainer.n_gpus_per_node",
            )
        ranks = world // (tensor * pipeline)
        shard = ranks if shard == -1 else shard
        row = sequence * context
        if shard < 1 or ranks % shard or shard % row:
            sizes = [size for size in range(1, ranks + 1) if ranks % size == 0 and size % row == 0]
            raise ConfigError(
                f"one copy of the parameters cannot be sharded over {shard} of {ranks} ranks ({row} share the tokens of a row)",
                why="all copies must have the same size, and ranks that share the tokens of a row must belong to one copy",
                where=config.key("fsdp_config.fsdp_size"),
                fix=f"{config.key('fsdp_config.fsdp_size')}=<one of {', '.join(map(str, sizes))}, or -1 for all>",
            )
        if shard % expert:
            raise ConfigError(
                f"{shard} ranks that share a copy of the parameters cannot be divided into groups of {expert} that "
                "share the experts",
                why="each group of ranks holds every expert once",
                where=config.key("expert_parallel_size"),
                fix=f"{config.key('expert_parallel_size')}=<a divisor of {shard}>",
            )
        return cls(world, ranks // shard, shard // row, sequence, tensor, expert, pipeline, context)

    @property
    def dp_size(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_a_shard(self) -> int:
        """Number of ranks that process the same rows."""
        return self.pipeline * self.ranks_a_row * self.tensor

    @property
    def ranks_a_row(self) -> int:
        return self.context * self.sequence

    def dp_rank(self, rank: int) -> int:
        return rank // self.ranks_a_shard

    def leads(self, rank: int) -> bool:
        return rank % self.ranks_a_shard == 0

    def ranks_of(self, dp_rank: int) -> range:
        return range(dp_rank * self.ranks_a_shard, (dp_rank + 1) * self.ranks_a_shard)
