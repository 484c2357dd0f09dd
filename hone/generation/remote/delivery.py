"""How a client hands weights to an engine's server: parcel by parcel, two under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hone.errors import GenerationError
from hone.generation.remote.connection import Connection
from hone.generation.remote.delta import REFUSED, Differences, as_entry, as_tensors, change_of
from hone.generation.remote.transports import AHEAD, PARCEL_BYTES, Named, Sender, buckets


@dataclass
class Traffic:
    """What was sent since the beginning.

    Attributes:
        weights_sent_bytes: of weights, or of what changed of them.
        weights_compared: entries of weights that the engine had a former version of, and that were compared with it.
        weights_changed: entries among them that were not what they had been.
        weights_refused: weights that were not whole when they arrived, and were sent again.
    """

    weights_sent_bytes: int = 0
    weights_compared: int = 0
    weights_changed: int = 0
    weights_refused: int = 0


class Delivery:
    """The way of weights into one engine.

    Args:
        connection: to its server.
        sender: the transport.
        dtype: that it computes in.
        bucket_bytes: of weights on their way at a time.
        delta: whether the server keeps what it gets, so that of later versions only what changed travels, with a checksum of the whole.
    """

    def __init__(
        self, connection: Connection, sender: Sender, dtype: torch.dtype, bucket_bytes: int, *, delta: bool
    ) -> None:
        self._connection, self._sender, self._dtype = connection, sender, dtype
        self._parcel_bytes = max(1, min(bucket_bytes // AHEAD, PARCEL_BYTES))
        self._delta, self._traffic = delta, Traffic()
        self._open: int | None = None

    @property
    def counters(self) -> dict[str, int]:
        """What was sent since the beginning; see :class:`Traffic`."""
        return asdict(self._traffic)

    async def hand_over(
        self, weights: Iterable[Named], version: int, *, last: bool, since: Differences | None = None
    ) -> None:
        """Send weights of a version.

        Args:
            weights: of it.
            version: number of it. One that fails, or is given up for another, begins anew.
            last: whether nothing more follows.
            since: what changed since the version that the engine has; None sends them whole.

        Raises:
            GenerationError: the engine cannot take them.
            EngineLost: the process died.
        """
        begun, self._open = self._open == version, None
        begun, refused = await self._send(weights, version, begun=begun, last=last, since=since)
        if refused:  # whole ones follow, however the server's copy went astray
            self._traffic.weights_refused += len(refused)
            begun, refused = await self._send(refused, version, begun=begun, last=last, since=None)
        if refused:
            raise GenerationError(
                f"{len(refused)} weights were not whole when they arrived, such as '{refused[0][0]}'",
                why="their checksums were others than those of the weights that were sent, twice",
                fix="actor_rollout_ref.rollout.checkpoint_engine.backend=file, or another network between the two",
            )
        if last and self._delta:  # only now is it known that all are right
            await asyncio.wrap_future(self._ask(None, version, first=not begun, last=True))
        self._open = None if last else version

    async def _send(
        self, weights: Iterable[Named], version: int, *, begun: bool, last: bool, since: Differences | None
    ) -> tuple[bool, list[Named]]:
        """Send parcels; returns whether anything of the version has been sent now, and the weights that were refused."""
        under_way: deque[tuple[asyncio.Future[Any], list[Named]]] = deque()
        refused: list[Named] = []

        async def finish_one() -> None:
            answer, bucket = under_way.popleft()
            if await answer == REFUSED:
                refused.extend(bucket)

        try:
            for bucket, ends in buckets(weights, self._parcel_bytes, self._room):
                if self._delta and not bucket:
                    continue
                if len(under_way) == AHEAD:
                    await finish_one()
                told = self._changes(bucket, since) if self._delta else self._wholes(bucket)
                asked = self._ask(version=version, first=not begun, last=ends and last and not self._delta, **told)
                under_way.append((asyncio.wrap_future(asked), bucket))
                begun = True
            while under_way:
                await finish_one()
        finally:  # the sender's memory is read until then
            await asyncio.gather(*(answer for answer, _ in under_way), return_exceptions=True)
        return begun, refused

    def _wholes(self, bucket: Iterable[Named]) -> dict[str, Any]:
        return {"parcel": self._packed([(name, self._as_served(tensor)) for name, tensor in bucket])}

    def _changes(self, bucket: Iterable[Named], since: Differences | None) -> dict[str, Any]:
        tensors: list[Named] = []
        entries = []
        for name, tensor in bucket:
            served = self._as_served(tensor)
            change = since.of(name, served) if since is not None else change_of(served, None)
            if change.changed is not None:
                self._traffic.weights_compared += served.numel()
                self._traffic.weights_changed += change.changed
            tensors += as_tensors(name, change)
            entries.append(as_entry(name, change))
        return {"parcel": self._packed(tensors), "entries": entries}

    def _packed(self, tensors: list[Named]) -> dict[str, Any] | None:
        self._traffic.weights_sent_bytes += sum(tensor.nbytes for _, tensor in tensors)
        return self._sender.pack(tensors) if tensors else None

    def _ask(self, parcel: dict[str, Any] | None, version: int, *, first: bool, last: bool, **more: Any) -> Future[Any]:
        return self._connection.ask("load", parcel=parcel, version=version, first=first, last=last, **more)

    def _room(self, tensor: Tensor) -> int:
        return tensor.nbytes if self._delta or tensor.dtype != self._dtype else self._sender.room(tensor)

    def _as_served(self, tensor: Tensor) -> Tensor:
        """In the dtype that the engine computes in: no more bytes than it keeps."""
        return tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor.detach()
