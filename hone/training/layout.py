"""Process groups of a role's model for every kind of parallelism, and how the processes of a pool meet.

Ranks that communicate most are neighbours. There are three grids over the same ranks, with tensor-parallel ranks innermost:

    data        [data, context, sequence, pipeline, tensor]  rows of each rank, ranks that share a row's tokens or layers
    parameters  [replicate, shard, tensor]                   FSDP: one copy is sharded over `shard` = data x context x sequence ranks
    experts     [replicate, expert_shard, expert, tensor]    the same ranks, with `shard` = expert_shard x expert

The dimensions `pipeline` (before `tensor` in the second and third grid) and `context` are there only if they are larger than 1. So 8
ranks with tensor 2 and sequence 2 get two different shards of a batch: ranks 0-3 the first, 4-7 the second.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hone.config.parallel import Layout
from hone.errors import ConfigError


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


def meeting_store(address: str, rank: int, world: int) -> Store:
    """Return the store at which ranks meet.

    ``address``: ``HOST:PORT``; rank 0 listens there.

    Raises DistNetworkError: rank 0 cannot listen at the address, or another rank cannot reach it.
    """
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), world, is_master=rank == 0, timeout=default_pg_timeout)


def join_ranks(device: torch.device, store: Store, rank: int, world: int) -> None:
    """Connect this process with the other ranks. Collective.

    On CUDA tensors of the device travel by NCCL, whose communicators are made at once for this process's GPU, and
    tensors of the host by gloo.

    Raises ConfigError: two ranks have the same GPU.
    """
    if device.type != "cuda":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        return
    gpu = torch.device("cuda", torch.cuda.current_device())
    require_separate_gpus(store, rank, world, gpu_identity(gpu))
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world, device_id=gpu)


def gpu_identity(device: torch.device) -> str:
    """Return a text that is the same for two processes only if they have the same GPU."""
    return f"GPU {torch.cuda.get_device_properties(device).uuid} of {socket.gethostname()}"


def require_separate_gpus(store: Store, rank: int, world: int, identity: str) -> None:
    """Check that every rank has a GPU of its own. Collective.

    Raises ConfigError: another rank has the same GPU; all ranks raise the same error.
    """
    store.set(f"gpu of rank {rank}", identity)
    ranks_of: dict[str, list[int]] = {}
    for other in range(world):
        ranks_of.setdefault(store.get(f"gpu of rank {other}").decode(), []).append(other)
    for gpu, ranks in ranks_of.items():
        if len(ranks) > 1:
            raise ConfigError(
                f"ranks {' and '.join(map(str, ranks))} have the same device, {gpu}",
                why="NCCL refuses two ranks on one GPU, and they would compete for its memory",
                fix="ray.device_fraction=1, or trainer.n_gpus_per_node=<GPUs of a node>",
                where="ray.device_fraction",
                code="R02",
            )
