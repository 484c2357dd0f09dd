"""An engine in another process, with the engine protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from hone.errors import ConfigError, GenerationError
from hone.generation.limits import RequestLimits
from hone.generation.protocol import Completion, EngineDescription, GenerationRequest
from hone.generation.remote import messages
from hone.generation.remote.connection import Connection
from hone.generation.remote.delivery import WeightTransfer
from hone.generation.remote.delta import Differences
from hone.generation.remote.images import MISSING, SentImages
from hone.generation.remote.process import EngineProcess, LaunchPlan
from hone.generation.remote.transports import Route
from hone.insight import activity

TOKEN_VARIABLE = "HONE_ENGINE_TOKEN"
"""Environment variable with the token of an attached server; secrets stay out of configurations."""
_BUCKET_BYTES = 512 * 2**20


class ServedEngine:
    """Client of an engine's server.

    Attributes:
        server_info: description that the server sent at connection.
    """

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
        self.server_info = server_info
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
        self._check_whole()
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

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        """Do nothing: the engine caches prefixes by their tokens, and drops the oldest by itself."""

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

    def _check_whole(self) -> None:
        if self._fence is not None:
            raise GenerationError(
                f"weights of version {self._fence} have arrived only in part",
                why="the engine would sample from a mixture of two policies",
                fix="send all weights of a version again; if the engine refused some, the previous error says why",
            )


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
