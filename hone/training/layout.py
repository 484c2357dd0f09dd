"""Process groups of a role's model for every kind of parallelism.

Ranks that communicate most are neighbours. There are three grids over the same ranks, with tensor-parallel ranks innermost:

    data        [data, context, sequence, pipeline, tensor]  rows of each rank, ranks that share a row's tokens or layers
    parameters  [replicate, shard, tensor]                   FSDP: one copy is sharded over `shard` = data x context x sequence ranks
    experts     [replicate, expert_shard, expert, tensor]    the same ranks, with `shard` = expert_shard x expert

The dimensions `pipeline` (before `tensor` in the second and third grid) and `context` are there only if they are larger than 1. So 8
ranks with tensor 2 and sequence 2 get two different shards of a batch: ranks 0-3 the first, 4-7 the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hone.config.parallel_layout import Layout


@dataclass(frozen=True)
class Meshes:
    """A layout with its process groups (see the module's docstring for the grids)."""

    layout: Layout
    data: DeviceMesh
    parameters: DeviceMesh
    experts: DeviceMesh | None
    row_group: ProcessGroup  # ranks that share a row's tokens, by context and by sequence parallelism

    @property
    def data_group(self) -> ProcessGroup:
        """One rank per shard of the batch, at this rank's position in the shard."""
        return self.data.get_group("data")

    @property
    def sequence_group(self) -> ProcessGroup:
        """Ranks that share a row's tokens, and the heads in attention."""
        return self.data.get_group("sequence")

    @property
    def context_group(self) -> ProcessGroup:
        """Ranks that share a row's tokens, in attention too."""
        assert self.layout.context > 1
        return self.data.get_group("context")

    @property
    def pipeline_group(self) -> ProcessGroup:
        """One rank of every pipeline stage."""
        if self.layout.pipeline == 1:  # a group of this rank
            return self.sequence_group
        return self.data.get_group("pipeline")

    @property
    def tensor_group(self) -> ProcessGroup:
        """Ranks that share every matrix."""
        return self.data.get_group("tensor")

    @property
    def fsdp(self) -> DeviceMesh:
        """Mesh for ``fully_shard``: one dimension, or replicas x shards."""
        return self._submesh(self.parameters, "shard")

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """Mesh for ``fully_shard`` of this rank's experts."""
        assert self.experts is not None
        return self._submesh(self.experts, "expert_shard")

    def _submesh(self, mesh: DeviceMesh, shard: str) -> DeviceMesh:
        names: Any = ("replicate", shard) if self.layout.dp_replicate > 1 else (shard,)
        return mesh[names]


def build_meshes(layout: Layout, device_type: str) -> Meshes:
    """Build the process groups of a layout.

    Collective: every rank calls it, after ``torch.distributed`` is initialised.
    """
    shard = layout.dp_shard * layout.ranks_a_row

    def grid(**sizes: int) -> DeviceMesh:
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    stages = {"pipeline": layout.pipeline} if layout.pipeline > 1 else {}
    ring = {"context": layout.context} if layout.context > 1 else {}
    data = grid(data=layout.dp_size, **ring, sequence=layout.sequence, **stages, tensor=layout.tensor)
    parameters = grid(replicate=layout.dp_replicate, shard=shard, **stages, tensor=layout.tensor)
    experts = None
    if layout.expert > 1:
        experts = grid(
            replicate=layout.dp_replicate,
            expert_shard=shard // layout.expert,
            expert=layout.expert,
            **stages,
            tensor=layout.tensor,
        )
    return Meshes(layout, data, parameters, experts, _row_group(layout, data))


def _row_group(layout: Layout, data: DeviceMesh) -> ProcessGroup:
    if layout.context == 1:
        return data.get_group("sequence")
    if layout.sequence == 1:
        return data.get_group("context")
    return data["context", "sequence"]._flatten("row").get_group()
