"""How the processes of a role share a model: the sizes of every kind of parallelism, and the process groups they need.

Ranks are numbered so that those which talk most are neighbours. Three grids lie over the same ranks, tensor-parallel ranks
innermost:

    data        [data, sequence, tensor]                     who sees which rows, who shares a row's tokens
    parameters  [replicate, shard, tensor]                   FSDP: one copy is cut over `shard` = its data x sequence ranks
    experts     [replicate, expert_shard, expert, tensor]    the same ranks, with `shard` = expert_shard x expert

So 8 ranks with tensor 2 and sequence 2 see two different shards of a batch: ranks 0-3 the first, 4-7 the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hone.config.parallel import ParallelConfig
from hone.errors import ConfigError

BLOCK = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Layout:
    """The sizes. Pure numbers: nothing is started or allocated.

    Attributes:
        world: ranks.
        dp_replicate: copies of the parameters.
        dp_shard: data-parallel ranks over which one copy is cut.
        sequence: ranks that share the tokens of a row (Ulysses).
        tensor: ranks that share every matrix.
        expert: ranks that share the experts.

    Raises:
        ConfigError: the sizes do not multiply to ``world``.
    """

    world: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.dp_replicate * self.dp_shard * self.sequence * self.tensor != self.world:
            raise ConfigError(
                f"{self.dp_replicate} copies x {self.dp_shard} data x {self.sequence} sequence x {self.tensor} tensor "
                f"parallel ranks are not {self.world} processes"
            )

    @classmethod
    def plan(cls, world: int, config: ParallelConfig) -> Layout:
        """The layout of ``world`` processes; data parallelism takes what the other sizes leave.

        Raises:
            ConfigError: a size does not divide, or the strategy is not supported; the message says by which numbers.
        """
        strategy(config, world)
        tensor, sequence = config.tensor_model_parallel_size, config.ulysses_sequence_parallel_size
        expert, shard = config.expert_parallel_size, config.fsdp_config.fsdp_size
        if world % (tensor * sequence):
            raise ConfigError(
                f"{world} processes cannot be divided into groups of {tensor} tensor x {sequence} sequence parallel ranks",
                why="every process must stand in exactly one such group",
                where=f"{BLOCK}.tensor_model_parallel_size",
                fix=f"choose {BLOCK}.tensor_model_parallel_size and {BLOCK}.ulysses_sequence_parallel_size whose "
                f"product divides {world}, the product of trainer.nnodes and trainer.n_gpus_per_node",
            )
        ranks = world // tensor
        shard = ranks if shard == -1 else shard
        if shard < 1 or ranks % shard or shard % sequence:
            sizes = [size for size in range(1, ranks + 1) if ranks % size == 0 and size % sequence == 0]
            raise ConfigError(
                f"one copy of the parameters cannot be cut over {shard} of {ranks} ranks (sequence parallel: {sequence})",
                why="the copies must be equal, and the ranks that share a row's tokens belong to one copy",
                where=f"{BLOCK}.fsdp_config.fsdp_size",
                fix=f"{BLOCK}.fsdp_config.fsdp_size=<one of {', '.join(map(str, sizes))}, or -1 for all>",
            )
        if shard % expert:
            raise ConfigError(
                f"{shard} ranks that share a copy of the parameters cannot be divided into groups of {expert} that "
                "share the experts",
                why="each group of ranks holds every expert once",
                where=f"{BLOCK}.expert_parallel_size",
                fix=f"{BLOCK}.expert_parallel_size=<a divisor of {shard}>",
            )
        return cls(world, ranks // shard, shard // sequence, sequence, tensor, expert)

    @property
    def dp_size(self) -> int:
        """How many different shards a batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_a_shard(self) -> int:
        """Ranks that see the same rows."""
        return self.sequence * self.tensor

    def dp_rank(self, rank: int) -> int:
        """Which shard of a batch ``rank`` sees."""
        return rank // self.ranks_a_shard

    def leads(self, rank: int) -> bool:
        """Whether ``rank`` is the one of those with the same rows that speaks for them."""
        return rank % self.ranks_a_shard == 0

    def ranks_of(self, dp_rank: int) -> range:
        """The ranks that see shard ``dp_rank``."""
        return range(dp_rank * self.ranks_a_shard, (dp_rank + 1) * self.ranks_a_shard)

    def meshes(self, device_type: str) -> Meshes:
        """Build the process groups. Collective: every rank calls it, after ``torch.distributed`` is initialised."""
        shard = self.dp_shard * self.sequence

        def grid(**sizes: int) -> DeviceMesh:
            return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        data = grid(data=self.dp_size, sequence=self.sequence, tensor=self.tensor)
        parameters = grid(replicate=self.dp_replicate, shard=shard, tensor=self.tensor)
        experts = None
        if self.expert > 1:
            experts = grid(
                replicate=self.dp_replicate,
                expert_shard=shard // self.expert,
                expert=self.expert,
                tensor=self.tensor,
            )
        return Meshes(self, data, parameters, experts)


@dataclass(frozen=True)
class Meshes:
    """A layout with its process groups (see the module's docstring for the grids)."""

    layout: Layout
    data: DeviceMesh
    parameters: DeviceMesh
    experts: DeviceMesh | None

    @property
    def data_group(self) -> ProcessGroup:
        """The ranks, one of each shard of the batch, that stand at this rank's place in their shard."""
        return self.data.get_group("data")

    @property
    def sequence_group(self) -> ProcessGroup:
        """The ranks that share a row's tokens."""
        return self.data.get_group("sequence")

    @property
    def tensor_group(self) -> ProcessGroup:
        """The ranks that share every matrix."""
        return self.data.get_group("tensor")

    @property
    def fsdp(self) -> DeviceMesh:
        """Mesh for ``fully_shard``: one dimension, or copies x shards."""
        return self._cut(self.parameters, "shard")

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The same for the experts that this rank holds."""
        assert self.experts is not None
        return self._cut(self.experts, "expert_shard")

    def _cut(self, mesh: DeviceMesh, shard: str) -> DeviceMesh:
        names: Any = ("replicate", shard) if self.layout.dp_replicate > 1 else (shard,)
        return mesh[names]


def strategy(config: ParallelConfig, world: int) -> str:
    """``local`` or ``fsdp2``, with null decided and other names resolved.

    Raises:
        ConfigError: the strategy is not supported, or does not suit so many processes.
    """
    if config.strategy in ("megatron", "torchtitan"):
        raise ConfigError(
            f"strategy '{config.strategy}' is not supported yet",
            why="models are divided by PyTorch's own parts: FSDP2, tensor, sequence and expert parallel",
            where=f"{BLOCK}.strategy",
            fix=f"{BLOCK}.strategy=fsdp2",
        )
    if config.strategy is None:
        return "local" if world == 1 else "fsdp2"
    if config.strategy == "local" and world > 1:
        raise ConfigError(
            f"strategy 'local' keeps the whole model in one process, and there are {world}",
            why="nothing would bring their gradients together",
            where=f"{BLOCK}.strategy",
            fix=f"{BLOCK}.strategy=fsdp2, or trainer.nnodes=1 trainer.n_gpus_per_node=1",
        )
    return "local" if config.strategy == "local" else "fsdp2"
