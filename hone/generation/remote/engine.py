"""An engine in another process, behind the protocol of all engines."""

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
from hone.generation.native.scheduler import Scheduler
from hone.generation.protocol import Completion, EngineDescription, GenerationRequest
from hone.generation.remote import messages
from hone.generation.remote.connection import Connection
from hone.generation.remote.delivery import Delivery
from hone.generation.remote.delta import Differences
from hone.generation.remote.process import EngineProcess, LaunchPlan
from hone.generation.remote.transports import make_sender
from hone.insight import activity

TOKEN_VARIABLE = "HONE_ENGINE_TOKEN"
"""Environment variable with the token of a server that is attached to by URL; secrets stay out of configurations."""
_BUCKET_BYTES = 512 * 2**20


class ServedEngine:
    """Speaks with an engine's server; makes no tokens itself.

    Attributes:
        process: of the server, if it was started here.
        told: what the server said of itself when it was connected to.

    Args:
        connection: to the server.
        process: of the server, if it was started here; :meth:`close` ends it.
        backend: how weights travel; see :mod:`hone.generation.remote.transports`.
        bucket_bytes: of weights on their way at a time.
        delta: whether the server keeps what it gets, so that of later versions only what changed travels.
    """

    def __init__(
        self,
        connection: Connection,
        process: EngineProcess | None = None,
        *,
        backend: str = "auto",
        bucket_bytes: int = _BUCKET_BYTES,
        delta: bool = False,
    ) -> None:
        self._connection, self.process = connection, process
        told: dict[str, Any] = connection.hello["description"]
        self.told = told
        longest = told["max_model_len"]
        self._limits = Scheduler(
            max_num_seqs=1, max_cache_tokens=told.get("max_cache_tokens") or longest, max_model_len=longest
        )
        dtype: torch.dtype = getattr(torch, told["dtype"])
        self._sender = make_sender(backend, same_machine=process is not None or told["local"])
        self._delivery = Delivery(connection, self._sender, dtype, bucket_bytes, delta=delta)
        self._fence: int | None = None
        self._keys = itertools.count()
        self._under_way: dict[str, str] = {}

    @classmethod
    def start(cls, plan: LaunchPlan, **options: Any) -> ServedEngine:
        """Start a process and connect to it; ``options`` as of the class.

        Raises:
            HoneError: it does not start.
        """
        process = EngineProcess(plan)
        try:
            connection = Connection(plan.host, process.port, process.token, process.obituary)
            return cls(connection, process, **options)
        except BaseException:
            process.kill()
            raise

    @classmethod
    def attach(cls, url: str, **options: Any) -> ServedEngine:
        """Connect to a server that runs already, at ``tcp://HOST:PORT``; ``options`` as of the class.

        Raises:
            ConfigError: there is none.
        """
        host, port = parse_url(url)
        return cls(Connection(host, port, os.environ.get(TOKEN_VARIABLE, "")), **options)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        """Serve the requests, yielding each completion as it finishes. A caller that goes away ends its requests.

        Raises:
            GenerationError: a request can never be served (none is begun then), or weights have arrived only in part.
            EngineLost: the process died.
        """
        for request in requests:
            self._limits.check(request)
        self._check_whole()
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Future[Any]] = asyncio.Queue()

        def deliver(done: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(answers.put_nowait, done)

        asked: dict[Future[Any], tuple[str, str]] = {}
        try:
            for request in requests:
                key = str(next(self._keys))  # names of requests may repeat between callers
                message = messages.request_as_message(request)
                self._under_way[key] = request.request_id
                future = self._connection.ask("generate", request={**message, "request_id": key})
                asked[future] = key, request.request_id
                future.add_done_callback(deliver)
            for _ in range(len(asked)):
                done = await answers.get()
                key, name = asked.pop(done)
                del self._under_way[key]
                activity.tick()
                yield messages.completion_of({**done.result(), "request_id": name})
        finally:
            for key, _ in asked.values():
                self._under_way.pop(key, None)
            if asked and self._connection.lost is None:
                self._connection.ask("abort", requests=[key for key, _ in asked.values()])

    async def load_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        last: bool = True,
        since: Differences | None = None,
    ) -> None:
        """Send weights. Until the last have arrived nothing is generated.

        Args:
            weights: of the policy, by name.
            version: of them.
            last: whether nothing more follows.
            since: what changed since the version that the engine has, where it keeps that (``delta``).

        Raises:
            GenerationError: the engine cannot take them; it stays fenced until a whole version has arrived.
            EngineLost: the process died.
        """
        self._fence = version
        with activity.waiting(f"engine {self.told['engine']}: load"):
            await self._delivery.hand_over(weights, version, last=last, since=since)
        if last:
            self._fence = None

    async def pause(self) -> None:
        """Stop decoding; requests stay where they are."""
        await self._ask("pause")

    async def resume(self) -> None:
        """Go on."""
        await self._ask("resume")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the given requests (all when None) with the tokens they have."""
        wanted = None if request_ids is None else set(request_ids)
        keys = [key for key, name in self._under_way.items() if wanted is None or name in wanted]
        await self._ask("abort", requests=keys)

    async def sleep(self) -> None:
        """Let go of what is cached; requests under way end as aborted."""
        await self._ask("sleep")

    async def wake(self) -> None:
        """Serve again."""
        await self._ask("wake")

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        """Nothing to do: an engine keeps prefixes by their tokens, and drops the oldest by itself."""

    def describe(self) -> EngineDescription:
        """What it is, and its counters since start."""
        told = self._connection.ask("describe").result(timeout=60)
        stats = {**told["stats"], **self._delivery.counters}
        return EngineDescription(told["engine"], False, told["dtype"], told["device"], stats)

    def close(self) -> None:
        """End the connection, and the process if it was started here."""
        self._connection.close()
        self._sender.close()
        if self.process is not None:
            self.process.kill()

    async def _ask(self, do: str, **fields: Any) -> Any:
        with activity.waiting(f"engine {self.told['engine']}: {do}"):
            return await asyncio.wrap_future(self._connection.ask(do, **fields))

    def _check_whole(self) -> None:
        if self._fence is not None:
            raise GenerationError(
                f"weights of version {self._fence} have arrived only in part",
                why="the engine would sample from a mixture of two policies",
                fix="send all weights of a version again; when the engine refused them, the error before this one says why",
            )


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``.

    Raises:
        ConfigError: it is something else.
    """
    parts = urlsplit(url)
    with contextlib.suppress(ValueError):
        if parts.scheme == "tcp" and parts.hostname and parts.port and not parts.path.strip("/"):
            return parts.hostname, parts.port
    raise ConfigError(
        f"'{url}' is no address of an engine",
        why="Hone speaks its own small protocol with engines, not HTTP",
        fix="rollout.engine_url=tcp://HOST:PORT of a server that `hone engines serve` started",
        where="actor_rollout_ref.rollout.engine_url",
    )
