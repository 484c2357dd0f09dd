"""Both ends of a weight sync: what the actor and the rollout workers do when :class:`~hone.cluster.weight_sync.WeightSync` calls them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Collect, Split, dispatch
from hone.cluster.weight_broadcast import (
    JOIN_SECONDS,
    SOURCE,
    BroadcastError,
    BroadcastGroup,
    Bucket,
    BucketBuffers,
    Meeting,
    open_store,
    time_limit,
)
from hone.config.limits import BROADCAST_BUFFERS
from hone.config.tree import RLConfig
from hone.generation.build import engine_dtype
from hone.generation.options import sends_adapter
from hone.generation.protocol import Engine
from hone.insight import activity
from hone.training.backends.protocol import TrainBackend


class BroadcastEnd:
    """One member's part of a broadcast; see :mod:`hone.cluster.weight_broadcast`.

    Attributes:
        group: None before the members have connected.
        buffers: of the buckets.
        buckets: buckets in the buffers, by number.
    """

    def __init__(self, device: torch.device) -> None:
        self.group: BroadcastGroup | None = None
        self.buffers = BucketBuffers(device)
        self.buckets: dict[int, Bucket] = {}

    def transfer(self, bucket: Bucket) -> None:
        """Send or receive a bucket. It ends by itself, so it counts as a hang only after its time limit."""
        if self.group is None:
            raise BroadcastError("this process is not a member of the group")
        with activity.doing(f"broadcast of bucket {bucket.number}", limit=2 * time_limit(bucket.size).total_seconds()):
            self.group.broadcast(self.buffers.memory(bucket))

    def leave(self) -> None:
        """Drop the group."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()

    def release(self) -> None:
        """Free the buffers."""
        self.buckets.clear()
        self.buffers.release()


class WeightSource:
    """The actor's side. All of its workers take part in gathering shards; the first one sends."""

    context: WorkerContext[RLConfig]
    engine: TrainBackend
    _exported: Iterator[tuple[str, Tensor]] = iter(())
    _sending: BroadcastEnd | None = None

    @dispatch(Split.ALL, Collect.EACH)
    def device_type(self) -> str:
        """Return ``cuda`` or ``cpu``."""
        return self.context.device.type

    @dispatch(Split.ALL, Collect.FIRST)
    def export_weights(self) -> None:
        """Begin a weight sync of the current weights, or the adapter alone: :meth:`next_weights` returns the buckets.

        Matrices are in the dtype of the engine, so that for one in bfloat16 half the bytes travel.
        """
        config = self.context.config
        which = "adapter" if sends_adapter(config) else "merged"
        self._exported = self.engine.export_weights(which, dtype=getattr(torch, engine_dtype(config)))

    @dispatch(Split.ALL, Collect.REMOTE)
    def next_weights(self, max_bytes: int) -> list[tuple[str, Tensor]] | None:
        """Return the next whole weights, at most ``max_bytes`` of them (but at least one); None after the last."""
        bucket, used = [], 0
        for name, tensor in self._exported:
            bucket.append((name, tensor))
            used += tensor.nbytes
            if used >= max_bytes:
                break
        return bucket or None

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
        self._sending = BroadcastEnd(self.context.device)
        with activity.doing("connecting with the rollout workers", limit=2 * JOIN_SECONDS):
            self._sending.group = BroadcastGroup(self._store, SOURCE, self._members, self.context.device)

    @dispatch(Split.ALL, Collect.FIRST)
    def pack_weights(self, number: int, max_bytes: int) -> Bucket | None:
        """Gather the weights of a bucket as :meth:`next_weights` does, into a buffer. Return the bucket; None after the last."""
        weights = self.next_weights(max_bytes)
        if self._sending is None or weights is None:
            return None
        bucket = self._sending.buffers.pack(number, weights)
        self._sending.buckets[number] = bucket
        self._sending.buckets.pop(number - BROADCAST_BUFFERS, None)
        return bucket

    @dispatch(Split.ZERO, background=True)
    def send_weights(self, number: int) -> None:
        """Broadcast a packed bucket. Collective.

        Raises:
            BroadcastError: a receiver died or is unreachable.
        """
        assert self._sending is not None, "join_broadcast() must be called first"
        self._sending.transfer(self._sending.buckets[number])

    @dispatch(Split.ZERO, Collect.REMOTE)
    def packed_weights(self, number: int) -> list[tuple[str, Tensor]]:
        """Return the weights of a packed bucket, after its broadcast failed."""
        assert self._sending is not None, "join_broadcast() must be called first"
        return self._sending.buffers.tensors(self._sending.buckets[number])

    @dispatch(Split.ZERO)
    def release_buckets(self) -> None:
        """Free the buffers of the weight sync."""
        if self._sending is not None:
            self._sending.release()

    @dispatch(Split.ZERO)
    def leave_broadcast(self) -> None:
        """Drop the group. The packed buckets stay."""
        if self._sending is not None:
            self._sending.leave()


class WeightTarget:
    """The side of a rollout worker that has an engine."""

    context: WorkerContext[RLConfig]
    engine: Engine
    _worker: int
    _receiving: BroadcastEnd | None = None

    @dispatch(Split.ALL, Collect.EACH)
    def device_type(self) -> str:
        """Return ``cuda`` or ``cpu``."""
        return self.context.device.type

    @dispatch(Split.ALL, Collect.FIRST)
    async def load_weights(self, weights: Sequence[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
        """Load some of the weights of this version; more follow unless they are the last."""
        await self.engine.load_weights(weights, version, last=last)

    @dispatch(Split.ALL, Collect.FIRST, background=True)
    def join_broadcast(self, meeting: Meeting) -> None:
        """Connect with the actor's first worker and the other receivers. Collective.

        Raises:
            BroadcastError: a member is missing.
            ConfigError: two members have the same GPU.
        """
        self._receiving = BroadcastEnd(self.context.device)
        with activity.doing("connecting with the actor", limit=2 * JOIN_SECONDS):
            self._receiving.group = BroadcastGroup.joined(meeting, SOURCE + 1 + self._worker, self.context.device)

    @dispatch(Split.ALL, Collect.FIRST, background=True)
    def receive_weights(self, bucket: Bucket) -> None:
        """Receive a bucket into a buffer. Collective.

        Raises:
            BroadcastError: the actor or another receiver died or is unreachable.
        """
        assert self._receiving is not None, "join_broadcast() must be called first"
        self._receiving.buckets[bucket.number] = bucket
        self._receiving.transfer(bucket)

    @dispatch(Split.ALL, Collect.FIRST)
    async def load_bucket(self, number: int, version: int, *, last: bool) -> None:
        """Load a received bucket into the engine; more follow unless it is the last."""
        assert self._receiving is not None, "join_broadcast() must be called first"
        bucket = self._receiving.buckets.pop(number)
        await self.engine.load_weights(self._receiving.buffers.tensors(bucket), version, last=last)

    @dispatch(Split.ALL, Collect.FIRST)
    def release_buckets(self) -> None:
        """Free the buffers of the weight sync."""
        if self._receiving is not None:
            self._receiving.release()

    @dispatch(Split.ALL, Collect.FIRST)
    def leave_broadcast(self) -> None:
        """Drop the group. The received buckets stay; the next group has buffers of its own."""
        if self._receiving is not None:
            self._receiving.leave()
