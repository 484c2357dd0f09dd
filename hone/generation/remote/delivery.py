"""Transfer of weights to an engine's server, in chunks, two in flight."""

from __future__ import annotations

import asyncio
import itertools
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
from hone.generation.remote.transports import CHUNK_BYTES, CHUNKS_IN_FLIGHT, CUDA_IPC, Named, Route, buckets


@dataclass
class TransferCounters:
    """Counters of the transfer since its start."""

    weights_sent_bytes: int = 0  # bytes of weights or of their changes
    weights_on_gpu_bytes: int = 0  # bytes among them that stayed on the GPU
    weights_compared: int = 0  # elements that were compared with the engine's previous version
    weights_changed: int = 0  # elements among them that differed
    weights_refused: int = 0  # weights whose checksum was wrong on arrival, and that were sent again


class WeightTransfer:
    """Sends weights to one engine.

    Args:
        bucket_bytes: maximum of weights in flight.
        delta: whether the server keeps a copy, so that later versions are sent as changes with a checksum of the result.
    """

    def __init__(
        self, connection: Connection, route: Route, dtype: torch.dtype, bucket_bytes: int, *, delta: bool
    ) -> None:
        self._connection, self._route, self._dtype = connection, route, dtype
        self._most_bytes = max(1, bucket_bytes // CHUNKS_IN_FLIGHT)
        self._delta, self._counters = delta, TransferCounters()
        self._open: int | None = None

    @property
    def stats(self) -> dict[str, Any]:
        """Counters since the start (:class:`TransferCounters`), and the transport in use with what keeps weights off the GPU."""
        route = self._route
        in_use = {"transport": route.transport, "transport_fallbacks": route.fallbacks}
        return {
            **asdict(self._counters),
            **in_use,
            **({"transport_obstacle": route.obstacle} if route.obstacle else {}),
        }

    async def send(
        self, weights: Iterable[Named], version: int, *, last: bool, since: Differences | None = None
    ) -> None:
        """Send weights of one version. A version that fails, or is replaced by another, starts again.

        ``last``: these are the version's last weights. ``since``: differences to the engine's version; None sends whole weights.

        Raises:
            EngineLost: the process died.
        """
        started, self._open = self._open == version, None
        weights = iter(weights)
        first = list(itertools.islice(weights, 1))
        if first and not started:
            started = await self._try_gpu(first[0][1], version)
        on_gpu = self._route.sender_for(first)
        most_bytes = min(self._most_bytes, CHUNK_BYTES if on_gpu is None else on_gpu.chunk_bytes)
        weights = itertools.chain(first, weights)
        started, refused = await self._send(weights, version, most_bytes, started=started, last=last, since=since)
        if refused:  # the server's copy was wrong: send whole weights
            self._counters.weights_refused += len(refused)
            started, refused = await self._send(refused, version, most_bytes, started=started, last=last, since=None)
        if refused:
            raise GenerationError(
                f"{len(refused)} weights were damaged on arrival, such as '{refused[0][0]}'",
                why="their checksums differed from those of the sent weights, twice",
                fix="actor_rollout_ref.rollout.checkpoint_engine.backend=file, or check the network to the engine",
            )
        if last and self._delta:  # now all checksums are right
            await asyncio.wrap_future(self._ask(None, version, first=not started, last=True))
        if last:
            self._route.finish()
        self._open = None if last else version

    async def _try_gpu(self, first: Tensor, version: int) -> bool:
        """Begin a version with an empty chunk of the GPU's memory, if it is unknown whether the engine can map it.

        If the engine cannot, this version and all others go through the host. Return whether the version has started.
        """
        self._route.begin(first)
        sender = self._route.untested
        if sender is None:
            return False
        try:
            await asyncio.wrap_future(self._ask(sender.pack([]), version, first=True, last=False))
        except Exception as error:  # noqa: BLE001  of the engine, of CUDA or of torch: each has the host as its way out
            self._route.fall_back(
                error.what if isinstance(error, GenerationError) else f"{type(error).__name__}: {error}"
            )
            return False
        self._route.opened()
        return True

    async def _send(
        self,
        weights: Iterable[Named],
        version: int,
        most_bytes: int,
        *,
        started: bool,
        last: bool,
        since: Differences | None,
    ) -> tuple[bool, list[Named]]:
        """Send chunks of at most ``most_bytes``; return whether the transfer of the version has started, and the refused weights."""
        under_way: deque[tuple[asyncio.Future[Any], list[Named]]] = deque()
        refused: list[Named] = []

        async def finish_one() -> None:
            answer, bucket = under_way.popleft()
            if await answer == REFUSED:
                refused.extend(bucket)

        try:
            for bucket, ends in buckets(weights, most_bytes, self._bytes_to_copy):
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
        if not tensors:
            return None
        size, chunk = sum(tensor.nbytes for _, tensor in tensors), self._route.pack(tensors)
        self._counters.weights_sent_bytes += size
        self._counters.weights_on_gpu_bytes += size * (chunk["transport"] == CUDA_IPC)
        return chunk

    def _ask(self, chunk: dict[str, Any] | None, version: int, *, first: bool, last: bool, **more: Any) -> Future[Any]:
        return self._connection.ask("load", chunk=chunk, version=version, first=first, last=last, **more)

    def _bytes_to_copy(self, tensor: Tensor) -> int:
        return tensor.nbytes if self._delta or tensor.dtype != self._dtype else self._route.host.bytes_to_copy(tensor)

    def _as_served(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the engine's compute dtype, which saves bytes."""
        return tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor.detach()
