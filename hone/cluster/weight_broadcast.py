"""Both ends of a broadcast of weights, on the roles of actor and rollout: what the actor and the rollout workers do when :class:`~hone.cluster.weight_sync.WeightSync` calls them.

A broadcast from the actor's first worker sends buckets in flat buffers::

    actor      pack k+1     | gather the next weights into the idle buffer
               send k       | broadcast the other buffer
    rollout    receive k    | broadcast into the idle buffer
               load k-1     | hand the other buffer's weights to the engine

All four run at the same time, and the next round begins when all have ended, so two buffers a process are enough: bucket ``k`` has
buffer ``k % 2``.

The process group is independent of torch's default group, which the actor's workers use among themselves. It is NCCL on GPUs, where
every member needs a GPU of its own, and gloo on CPUs. A member that died or is unreachable ends the broadcast of the others with a
:class:`BroadcastError`, at the latest after a time limit. The group is then of no more use.
"""

from __future__ import annotations

import contextlib
import functools
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, TCPStore

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Collect, Split, dispatch
from hone.cluster.failures import BroadcastError
from hone.config.limits import BROADCAST_BUFFERS
from hone.config.tree import RLConfig
from hone.generation.protocol import Engine
from hone.generation.remote.transports import Named, layout, view
from hone.insight import activity
from hone.training.layout import gpu_identity, require_separate_gpus

SOURCE = 0
"""Rank of the actor's first worker; the rollout workers follow it."""
JOIN_SECONDS = 60.0
"""Time limit of making a group."""
_BASE_SECONDS = 30.0
_SLOWEST = 16 * 2**20
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


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
class Bucket:
    """Weights that travel together.

    Attributes:
        number: of the bucket in its weight sync.
        places: of the weights in the buffer (:mod:`hone.generation.remote.transports`).
        size: bytes of the buffer.
    """

    number: int
    places: list[dict[str, Any]]
    size: int


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
        bucket = Bucket(number, *layout(tensors))
        self.memory(bucket)
        with torch.no_grad():
            for (_, view), (_, tensor) in zip(self.tensors(bucket), tensors, strict=True):
                view.copy_(tensor)
        return bucket

    def tensors(self, bucket: Bucket) -> list[Named]:
        """Return the weights of a bucket, as views of its buffer."""
        memory = self.memory(bucket)
        return [(place["name"], view(memory, place)) for place in bucket.places]


class BroadcastEnd:
    """One member's part of a broadcast; see :mod:`hone.cluster.weight_broadcast`."""

    context: WorkerContext[RLConfig]
    _group: BroadcastGroup | None = None
    """None before the members have connected."""

    @functools.cached_property
    def _buffers(self) -> BucketBuffers:
        return BucketBuffers(self.context.device)

    @functools.cached_property
    def _buckets(self) -> dict[int, Bucket]:
        """Buckets in the buffers, by number."""
        return {}

    @dispatch(Split.ALL, Collect.EACH)
    def device_type(self) -> str:
        """Return ``cuda`` or ``cpu``."""
        return self.context.device.type

    @dispatch(Split.ALL, Collect.FIRST)
    def release_buckets(self) -> None:
        """Free the buffers of the weight sync."""
        self._buckets.clear()
        self._buffers.release()

    @dispatch(Split.ALL, Collect.FIRST)
    def leave_broadcast(self) -> None:
        """Drop the group. The buckets stay."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _transfer(self, bucket: Bucket) -> None:
        """Send or receive a bucket. It ends by itself, so it counts as a hang only after its time limit."""
        if self._group is None:
            raise BroadcastError("this process is not a member of the group")
        with activity.doing(f"broadcast of bucket {bucket.number}", limit=2 * time_limit(bucket.size).total_seconds()):
            self._group.broadcast(self._buffers.memory(bucket))


class WeightSource(BroadcastEnd):
    """The actor's side. All of its workers take part in gathering shards; the first one sends."""

    @abstractmethod
    def next_weights(self, max_bytes: int) -> list[Named] | None:
        """Return the next whole weights; see :class:`~hone.cluster.roles.PolicyWorker`."""

    @dispatch(Split.ZERO)
    def open_broadcast(self, members: int) -> Meeting:
        """Serve the store of a new group of this number of processes.

        Raises:
            BroadcastError: the machine cannot be reached at its address.
        """
        self.leave_broadcast()
        self._store = open_store(self.context.host)
        self._members = members
        return Meeting(self.context.host, self._store.port, members)

    @dispatch(Split.ZERO, background=True)
    def join_broadcast(self) -> None:
        """Connect with the receivers. Collective.

        Raises:
            BroadcastError: a member is missing.
            ConfigError: two members have the same GPU.
        """
        with activity.doing("connecting with the rollout workers", limit=2 * JOIN_SECONDS):
            self._group = BroadcastGroup(self._store, SOURCE, self._members, self.context.device)

    @dispatch(Split.ALL, Collect.FIRST)
    def pack_weights(self, number: int, max_bytes: int) -> Bucket | None:
        """Gather the weights of a bucket as :meth:`next_weights` does, into a buffer. Return the bucket; None after the last."""
        weights = self.next_weights(max_bytes)
        if self.context.rank or weights is None:
            return None
        self._buckets[number] = bucket = self._buffers.pack(number, weights)
        self._buckets.pop(number - BROADCAST_BUFFERS, None)
        return bucket

    @dispatch(Split.ZERO, background=True)
    def send_weights(self, number: int) -> None:
        """Broadcast a packed bucket. Collective.

        Raises:
            BroadcastError: a receiver died or is unreachable.
        """
        self._transfer(self._buckets[number])

    @dispatch(Split.ZERO, Collect.REMOTE)
    def packed_weights(self, number: int) -> list[tuple[str, Tensor]]:
        """Return the weights of a packed bucket, after its broadcast failed."""
        return self._buffers.tensors(self._buckets[number])


class WeightTarget(BroadcastEnd):
    """The side of a rollout worker that has an engine."""

    engine: Engine
    _worker: int

    @dispatch(Split.ALL, Collect.FIRST, background=True)
    def join_broadcast(self, meeting: Meeting) -> None:
        """Connect with the actor's first worker and the other receivers. Collective.

        Raises:
            BroadcastError: a member is missing.
            ConfigError: two members have the same GPU.
        """
        with activity.doing("connecting with the actor", limit=2 * JOIN_SECONDS):
            self._group = BroadcastGroup.joined(meeting, SOURCE + 1 + self._worker, self.context.device)

    @dispatch(Split.ALL, Collect.FIRST, background=True)
    def receive_weights(self, bucket: Bucket) -> None:
        """Receive a bucket into a buffer. Collective.

        Raises:
            BroadcastError: the actor or another receiver died or is unreachable.
        """
        self._buckets[bucket.number] = bucket
        self._transfer(bucket)

    @dispatch(Split.ALL, Collect.FIRST)
    async def load_bucket(self, number: int, version: int, *, last: bool) -> None:
        """Load a received bucket into the engine; more follow unless it is the last."""
        bucket = self._buckets.pop(number)
        await self.engine.load_weights(self._buffers.tensors(bucket), version, last=last)
