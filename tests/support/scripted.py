"""An engine that says what a test tells it to, and an endpoint over it in a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.agents.episode import EngineClient
from hone.agents.serving.app import Endpoint
from hone.agents.serving.gateway import Gateway
from hone.agents.serving.server import HttpServer
from hone.agents.serving.service import Service
from hone.data.types import StopReason
from hone.generation.protocol import Completion, EngineDescription, GenerationRequest
from hone.trainers.serving import engine_loop


@dataclass
class ScriptedEngine:
    """Replies with ``script(request)``: token ids, of which it takes as many as the request allows.

    Log-probs are made of the seed and the place, so that a test can tell which were reported.

    Attributes:
        asked: every request, in order.
        ended: sessions that were ended.
        aborted: names of requests that were.
        step: tokens between two reports of progress.
    """

    script: Callable[[GenerationRequest], list[int]]
    seconds: float = 0.0
    step: int = 2
    asked: list[GenerationRequest] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        for request in requests:
            self.asked.append(request)
            whole = self.script(request)
            ids = whole[: request.sampling.max_tokens]
            log_probs = [-(request.seed % 97 + place + 1) / 100 for place in range(len(ids))]
            if request.progress is not None:
                for stop in range(self.step, len(ids), self.step):
                    request.progress(ids[:stop], log_probs[:stop], [])
            await asyncio.sleep(self.seconds)
            reason = StopReason.STOP if len(ids) == len(whole) else StopReason.LENGTH
            yield Completion(request.request_id, ids, log_probs, log_probs, reason, (3, 3), self.seconds)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.aborted += request_ids or ["all"]

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        self.ended += sessions

    def describe(self) -> EngineDescription:
        return EngineDescription("scripted", False, "float32", "cpu")

    def close(self) -> None:
        pass


@contextlib.contextmanager
def served(engine: Any, tokenizer: Any, *, token: str | None = None, **options: Any) -> Iterator[tuple[str, Endpoint]]:
    """A real HTTP server over ``engine``; yields its address and the endpoint."""
    with engine_loop() as loop:
        gateway = Gateway(EngineClient(engine), loop, most_waiting=options.pop("most_waiting", 16384))
        settings = {"model": "tiny", "max_model_len": 4096, **options}
        endpoint = Endpoint(Service(tokenizer=tokenizer, gateway=gateway, **settings), token=token)
        server = HttpServer(endpoint.app)
        server.start()
        try:
            yield server.url, endpoint
        finally:
            server.stop()
