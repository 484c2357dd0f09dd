"""Transfer of weights to an engine's server, in chunks, two in flight."""

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
from hone.generation.remote.transports import CHUNK_BYTES, CHUNKS_IN_FLIGHT, Named, Sender, buckets


@dataclass
class TransferCounters:
    """Counters of the transfer since its start.

    Attributes:
        weights_sent_bytes: bytes of weights or of their changes.
        weights_compared: elements that were compared with the engine's previous version.
        weights_changed: elements among them that differed.
        weights_refused: weights whose checksum was wrong on arrival, and that were sent again.
    """

    weights_sent_bytes: int = 0
    weights_compared: int = 0
    weights_changed: int = 0
    weights_refused: int = 0


class WeightTransfer:
    """Sends weights to one engine.

    Args:
        connection: to the engine's server.
        sender: the transport.
        dtype: compute dtype of the engine.
        bucket_bytes: maximum of weights in flight.
        delta: whether the server keeps a copy, so that later versions are sent as changes with a checksum of the result.
    """

    def __init__(
        self, connection: Connection, sender: Sender, dtype: torch.dtype, bucket_bytes: int, *, delta: bool
    ) -> None:
        self._connection, self._sender, self._dtype = connection, sender, dtype
        self._chunk_bytes = max(1, min(bucket_bytes // CHUNKS_IN_FLIGHT, CHUNK_BYTES))
        self._delta, self._counters = delta, TransferCounters()
        self._open: int | None = None

    @property
    def counters(self) -> dict[str, int]:
        """Counters since the start; see :class:`TransferCounters`."""
        return asdict(self._counters)

    async def send(
        self, weights: Iterable[Named], version: int, *, last: bool, since: Differences | None = None
    ) -> None:
        """Send weights of one version.

        Args:
            weights: by name.
            version: number of the version. A version that fails, or is replaced by another, starts again.
            last: whether these are the last weights of the version.
            since: differences to the engine's version; None sends whole weights.

        Raises:
            GenerationError: the engine refuses them.
            EngineLost: the process died.
        """
        started, self._open = self._open == version, None
        started, refused = await self._send(weights, version, started=started, last=last, since=since)
        if refused:  # the server's copy was wrong: send whole weights
            self._counters.weights_refused += len(refused)
            started, refused = await self._send(refused, version, started=started, last=last, since=None)
        if refused:
            raise GenerationError(
                f"{len(refused)} weights were damaged on arrival, such as '{refused[0][0]}'",
                why="their checksums differed from those of the sent weights, twice",
                fix="actor_rollout_ref.rollout.checkpoint_engine.backend=file, or check the network to the engine",
            )
        if last and self._delta:  # now all checksums are right
            await asyncio.wrap_future(self._ask(None, version, first=not started, last=True))
        self._open = None if last else version

    async def _send(
        self, weights: Iterable[Named], version: int, *, started: bool, last: bool, since: Differences | None
    ) -> tuple[bool, list[Named]]:
        """Send chunks; return whether the transfer of the version has started, and the refused weights."""
        under_way: deque[tuple[asyncio.Future[Any], list[Named]]] = deque()
        refused: list[Named] = []

        async def finish_one() -> None:
            answer, bucket = under_way.popleft()
            if await answer == REFUSED:
                refused.extend(bucket)

        try:
            for bucket, ends in buckets(weights, self._chunk_bytes, self._bytes_to_copy):
                if self._delta and not bucket:
                    continue
                if len(under_way) == CHUNKS_IN_FLIGHT:
                    await finish_one()
                fields = self._changes(bucket, since) if self._delta else self._wholes(bucket)
                answer = self._ask(version=version, first=not started, last=ends and last and not self._delta, **fields)
                under_way.append((asyncio.wrap_future(answer), bucket))
                started = True
            while under_way:
                await finish_one()
        finally:  # until then the engine reads the sender's memory
            await asyncio.gather(*(answer for answer, _ in under_way), return_exceptions=True)
        return started, refused

    def _wholes(self, bucket: Iterable[Named]) -> dict[str, Any]:
        return {"chunk": self._packed([(name, self._as_served(tensor)) for name, tensor in bucket])}

    def _changes(self, bucket: Iterable[Named], since: Differences | None) -> dict[str, Any]:
        tensors: list[Named] = []
        entries = []
        for name, tensor in bucket:
            served = self._as_served(tensor)
            change = since.change(name, served) if since is not None else change_of(served, None)
            if change.changed is not None:
                self._counters.weights_compared += served.numel()
                self._counters.weights_changed += change.changed
            tensors += as_tensors(name, change)
            entries.append(as_entry(name, change))
        return {"chunk": self._packed(tensors), "entries": entries}

    def _packed(self, tensors: list[Named]) -> dict[str, Any] | None:
        self._counters.weights_sent_bytes += sum(tensor.nbytes for _, tensor in tensors)
        return self._sender.pack(tensors) if tensors else None

    def _ask(self, chunk: dict[str, Any] | None, version: int, *, first: bool, last: bool, **more: Any) -> Future[Any]:
        return self._connection.ask("load", chunk=chunk, version=version, first=first, last=last, **more)

    def _bytes_to_copy(self, tensor: Tensor) -> int:
        return tensor.nbytes if self._delta or tensor.dtype != self._dtype else self._sender.bytes_to_copy(tensor)

    def _as_served(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the engine's compute dtype, which saves bytes."""
        return tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor.detach()
