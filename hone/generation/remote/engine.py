"""An engine in another process, with the engine protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from hone.errors import ConfigError, GenerationError
from hone.generation.limits import RequestLimits
from hone.generation.protocol import Completion, Engine, EngineDescription, GenerationRequest, incomplete_weights
from hone.generation.remote import messages
from hone.generation.remote.delta import REFUSED, Differences, as_entry, as_tensors, change_of
from hone.generation.remote.messages import MISSING, Connection, SentImages
from hone.generation.remote.process import EngineProcess, LaunchPlan
from hone.generation.remote.transports import CHUNK_BYTES, CHUNKS_IN_FLIGHT, CUDA_IPC, Named, Route, buckets
from hone.insight import activity

_COUNTERS = (
    "weights_sent_bytes",  # bytes of weights or of their changes
    "weights_on_gpu_bytes",  # bytes among them that stayed on the GPU
    "weights_compared",  # elements that were compared with the engine's previous version
    "weights_changed",  # elements among them that differed
    "weights_refused",  # weights whose checksum was wrong on arrival, and that were sent again
)


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
        self._delta, self._counters = delta, dict.fromkeys(_COUNTERS, 0)
        self._open: int | None = None

    @property
    def stats(self) -> dict[str, Any]:
        """Counters since the start, and the transport in use with what keeps weights off the GPU."""
        route = self._route
        in_use = {"transport": route.transport, "transport_fallbacks": route.fallbacks}
        return self._counters | in_use | ({"transport_obstacle": route.obstacle} if route.obstacle else {})

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
            self._counters["weights_refused"] += len(refused)
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
                self._counters["weights_compared"] += served.numel()
                self._counters["weights_changed"] += change.changed
            tensors += as_tensors(name, change)
            entries.append(as_entry(name, change))
        return {"chunk": self._packed(tensors), "entries": entries}

    def _packed(self, tensors: list[Named]) -> dict[str, Any] | None:
        if not tensors:
            return None
        size, chunk = sum(tensor.nbytes for _, tensor in tensors), self._route.pack(tensors)
        self._counters["weights_sent_bytes"] += size
        self._counters["weights_on_gpu_bytes"] += size * (chunk["transport"] == CUDA_IPC)
        return chunk

    def _ask(self, chunk: dict[str, Any] | None, version: int, *, first: bool, last: bool, **more: Any) -> Future[Any]:
        return self._connection.ask("load", chunk=chunk, version=version, first=first, last=last, **more)

    def _bytes_to_copy(self, tensor: Tensor) -> int:
        return tensor.nbytes if self._delta or tensor.dtype != self._dtype else self._route.host.bytes_to_copy(tensor)

    def _as_served(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the engine's compute dtype, which saves bytes."""
        return tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor.detach()


TOKEN_VARIABLE = "HONE_ENGINE_TOKEN"
"""Environment variable with the token of an attached server; secrets stay out of configurations."""
_BUCKET_BYTES = 512 * 2**20


class ServedEngine(Engine):
    """Client of an engine's server, whose cache drops the oldest prefixes by itself."""

    def __init__(
        self,
        connection: Connection,
        process: EngineProcess | None = None,  # of the server, if this process started it; :meth:`close` ends it
        *,
        backend: str = "auto",  # transport of weights; see :mod:`hone.generation.remote.transports`
        bucket_bytes: int = _BUCKET_BYTES,  # maximum of weights in flight
        delta: bool = False,  # whether the server keeps a copy, so that later versions are sent as changes
    ) -> None:
        self._connection, self.process = connection, process
        server_info: dict[str, Any] = connection.hello["description"]
        self.server_info = server_info  # description that the server sent at connection
        self._limits = RequestLimits(
            server_info["max_model_len"],
            server_info.get("max_cache_tokens"),
            reads_images=server_info["reads_images"],
        )
        self._images = SentImages()
        dtype: torch.dtype = getattr(torch, server_info["dtype"])
        self._route = Route(
            backend,
            engine=server_info["engine"],
            gpus=server_info["gpus"],
            same_machine=process is not None or server_info["local"],
            delta=delta,
        )
        self._transfer = WeightTransfer(connection, self._route, dtype, bucket_bytes, delta=delta)
        self._fence: int | None = None
        self._keys = itertools.count()
        self._under_way: dict[str, str] = {}

    @classmethod
    def start(cls, plan: LaunchPlan, **options: Any) -> ServedEngine:
        """Start a process and connect to it; ``options`` are those of the class."""
        process = EngineProcess(plan)
        try:
            connection = Connection(plan.host, process.port, process.token, process.exit_reason)
            return cls(connection, process, **options)
        except BaseException:
            process.kill()
            raise

    @classmethod
    def attach(cls, url: str, **options: Any) -> ServedEngine:
        """Connect to a running server at ``tcp://HOST:PORT``; ``options`` are those of the class."""
        host, port = parse_url(url)
        return cls(Connection(host, port, os.environ.get(TOKEN_VARIABLE, "")), **options)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        """Serve the requests, yielding each completion as it finishes. Closing the iterator aborts its requests.

        Raises:
            EngineLost: the process died.
        """
        for request in requests:
            self._limits.check(request)
        if self._fence is not None:
            raise incomplete_weights(f"of version {self._fence}")
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Future[Any]] = asyncio.Queue()

        def deliver(done: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(answers.put_nowait, done)

        pending: dict[Future[Any], tuple[str, GenerationRequest]] = {}

        def ask(key: str, request: GenerationRequest, *, again: bool = False) -> None:
            message = messages.request_as_message(request, self._images.entries(request.images, again=again))
            self._under_way[key] = request.request_id
            future = self._connection.ask("generate", request={**message, "request_id": key})
            pending[future] = key, request
            future.add_done_callback(deliver)

        try:
            for request in requests:
                ask(str(next(self._keys)), request)  # request ids may repeat between callers
            while pending:
                done = await answers.get()
                key, request = pending.pop(done)
                del self._under_way[key]
                activity.tick()
                if done.result() == MISSING:
                    ask(key, request, again=True)
                    continue
                yield messages.completion_of({**done.result(), "request_id": request.request_id})
        finally:
            for key, _ in pending.values():
                self._under_way.pop(key, None)
            if pending and self._connection.lost is None:
                self._connection.ask("abort", requests=[key for key, _ in pending.values()])

    async def load_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        last: bool = True,
        since: Differences | None = None,
    ) -> None:
        """Send weights; ``since``: differences to the engine's version, if the engine keeps a copy (``delta``).

        Raises:
            EngineLost: the process died.
        """
        self._fence = version
        with activity.waiting(f"engine {self.server_info['engine']}: load"):
            await self._transfer.send(weights, version, last=last, since=since)
        if last:
            self._fence = None

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        wanted = None if request_ids is None else set(request_ids)
        keys = [key for key, name in self._under_way.items() if wanted is None or name in wanted]
        await self._ask("abort", requests=keys)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await self._ask("sleep", keep_weights=keep_weights)

    async def wake(self, *, cache: bool = True) -> None:
        await self._ask("wake", cache=cache)

    def describe(self) -> EngineDescription:
        """Return the engine's properties, its counters since start, and the transport of weights."""
        report = self._connection.ask("describe").result(timeout=60)
        stats = {**report["stats"], **self._transfer.stats}
        return EngineDescription(report["engine"], False, report["dtype"], report["device"], stats)

    def close(self) -> None:
        self._connection.close()
        if self.process is not None:
            self.process.kill()  # first, because it may have mapped memory of the sender
        self._route.close()

    async def _ask(self, do: str, **fields: Any) -> Any:
        with activity.waiting(f"engine {self.server_info['engine']}: {do}"):
            return await asyncio.wrap_future(self._connection.ask(do, **fields))


def parse_url(url: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``."""
    parts = urlsplit(url)
    with contextlib.suppress(ValueError):
        if parts.scheme == "tcp" and parts.hostname and parts.port and not parts.path.strip("/"):
            return parts.hostname, parts.port
    raise ConfigError(
        f"'{url}' is not the address of an engine",
        why="Hone uses its own protocol with engines, not HTTP",
        fix="rollout.engine_url=tcp://HOST:PORT of a server that `hone engines serve` started",
        where="actor_rollout_ref.rollout.engine_url",
    )
