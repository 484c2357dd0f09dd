"""Start of ``torch.distributed`` in the processes of a pool that share models."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from hone.errors import ConfigError


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
