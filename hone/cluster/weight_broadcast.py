"""Broadcast of weights from the actor's first worker to the rollout workers: process group, and buckets in flat buffers.

::

    actor      pack k+1     | gather the next weights into the idle buffer
               send k       | broadcast the other buffer
    rollout    receive k    | broadcast into the idle buffer
               load k-1     | hand the other buffer's weights to the engine

All four run at the same time. :class:`~hone.cluster.weight_sync.WeightSync` begins the next round when all have ended, so two
buffers a process are enough: bucket ``k`` has buffer ``k % 2``.

The process group is independent of torch's default group, which the actor's workers use among themselves. It is NCCL on GPUs, where
every member needs a GPU of its own, and gloo on CPUs. A member that died or is unreachable ends the broadcast of the others with a
:class:`BroadcastError`, at the latest after a time limit. The group is then of no more use.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, TCPStore

from hone.config.limits import BROADCAST_BUFFERS
from hone.training.rendezvous import gpu_identity, require_separate_gpus

SOURCE = 0
"""Rank of the actor's first worker; the rollout workers follow it."""
JOIN_SECONDS = 60.0
"""Time limit of making a group."""
_BASE_SECONDS = 30.0
_SLOWEST = 16 * 2**20
_ALIGNED = 256
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
Named = tuple[str, Tensor]


class BroadcastError(RuntimeError):
    """The process group could not be made, or a broadcast failed: a member died or is unreachable. Weights can go another way."""


@dataclass(frozen=True)
class Meeting:
    """Place where the members of a group connect.

    Attributes:
        host: address of the source's machine.
        port: of the source's store.
        members: number of processes.
    """

    host: str
    port: int
    members: int


def time_limit(size: int) -> timedelta:
    """Return the time limit of the broadcast of ``size`` bytes: half a minute, and a second for every 16 MiB."""
    return timedelta(seconds=_BASE_SECONDS + size / _SLOWEST)


class BroadcastGroup:
    """Process group of the source and the receivers of weights.

    Args:
        store: that the members share.
        rank: of this process.
        members: number of processes.
        device: of this process; all have the same kind.

    Raises:
        BroadcastError: a member is missing.
        ConfigError: two members have the same GPU.
    """

    def __init__(self, store: TCPStore, rank: int, members: int, device: torch.device) -> None:
        self._store = store  # rank 0 serves it while the group exists
        self._backend: Backend | None = None
        with _as_broadcast_error(f"the {members} members of the group did not connect"):
            if device.type == "cuda":
                self._backend = _nccl(store, rank, members, device)
            else:
                self._backend = dist.ProcessGroupGloo(store, rank, members, timedelta(seconds=JOIN_SECONDS))

    @classmethod
    def joined(cls, meeting: Meeting, rank: int, device: torch.device) -> BroadcastGroup:
        """Connect a receiver with the source; see :class:`BroadcastGroup`."""
        limit = timedelta(seconds=JOIN_SECONDS)
        with _as_broadcast_error(f"the source at {meeting.host}:{meeting.port} does not answer"):
            store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
        return cls(store, rank, meeting.members, device)

    def broadcast(self, buffer: Tensor) -> None:
        """Send a buffer to all members, or receive it from the source. Collective; blocks the calling thread.

        Raises:
            BroadcastError: a member died, or the time limit has passed.
        """
        limit, backend = time_limit(buffer.nbytes), self._backend
        with _as_broadcast_error(f"a broadcast of {buffer.nbytes / 2**20:.1f} MiB failed"):
            if backend is None:
                raise RuntimeError("the group was dropped")
            backend.broadcast(buffer, SOURCE, limit).wait(limit)  # type: ignore[attr-defined] # missing in torch's stub

    def abort(self) -> None:
        """Close the connections. On GPUs a broadcast under way ends with an error, by gloo only after its time limit."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()


def open_store(host: str) -> TCPStore:
    """Serve the store of a new group on a free port of this machine.

    Raises:
        BroadcastError: the machine cannot be reached at its address ``host``.
    """
    with _as_broadcast_error(f"no store at {host}"):
        limit = timedelta(seconds=JOIN_SECONDS)
        return TCPStore(host, 0, is_master=True, timeout=limit, wait_for_workers=False)


def _nccl(store: TCPStore, rank: int, members: int, device: torch.device) -> Backend:
    """Connect over NCCL. Waits block the host and raise on failure.

    Otherwise a watchdog thread of torch would end the process when a member is lost.
    """
    require_separate_gpus(store, rank, members, gpu_identity(device))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=JOIN_SECONDS)
    with _variable(_BLOCKING_WAIT, "1"):  # the constructor reads it; there is no argument
        backend = dist.ProcessGroupNCCL(store, rank, members, options)
    backend.eager_connect_single_device(device)
    return backend


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _as_broadcast_error(what: str) -> Iterator[None]:
    """Raise torch's errors, which are RuntimeErrors, as a :class:`BroadcastError`."""
    try:
        yield
    except RuntimeError as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BroadcastError(f"{what}: {cause} (torch.distributed, gloo or NCCL)") from error


# buckets -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedWeight:
    """Place of a weight in the buffer of its bucket; ``offset`` in bytes."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Weights that travel together.

    Attributes:
        number: of the bucket in its weight sync.
        weights: places of the weights.
        size: bytes of the buffer.
    """

    number: int
    weights: tuple[PackedWeight, ...]
    size: int

    @classmethod
    def from_tensors(cls, number: int, tensors: Sequence[Named]) -> Bucket:
        """Return the bucket of these tensors, in their order."""
        weights, offset = [], 0
        for name, tensor in tensors:
            weights.append(PackedWeight(name, tensor.dtype, tensor.shape, offset))
            offset += math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED
        return cls(number, tuple(weights), max(offset, _ALIGNED))


class BucketBuffers:
    """Two flat buffers of one process; they grow to the largest bucket.

    Args:
        device: of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.release()

    def release(self) -> None:
        """Free the memory."""
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self._device) for _ in range(BROADCAST_BUFFERS)]

    def memory(self, bucket: Bucket) -> Tensor:
        """Return the bytes of a bucket; those of the bucket two numbers earlier are overwritten."""
        slot = bucket.number % BROADCAST_BUFFERS
        if self._buffers[slot].numel() < bucket.size:
            self._buffers[slot] = torch.empty(0, dtype=torch.uint8, device=self._device)  # free before allocating
            self._buffers[slot] = torch.empty(bucket.size, dtype=torch.uint8, device=self._device)
        return self._buffers[slot][: bucket.size]

    def pack(self, number: int, tensors: Sequence[Named]) -> Bucket:
        """Copy tensors into the buffer of a bucket."""
        bucket = Bucket.from_tensors(number, tensors)
        self.memory(bucket)
        with torch.no_grad():
            for (_, view), (_, tensor) in zip(self.tensors(bucket), tensors, strict=True):
                view.copy_(tensor)
        return bucket

    def tensors(self, bucket: Bucket) -> list[Named]:
        """Return the weights of a bucket, as views of its buffer."""
        memory = self.memory(bucket)
        return [(weight.name, _view(memory, weight)) for weight in bucket.weights]


def _view(memory: Tensor, weight: PackedWeight) -> Tensor:
    size = weight.shape.numel() * weight.dtype.itemsize
    return memory[weight.offset : weight.offset + size].view(weight.dtype).view(weight.shape)
