"""Access to the engine from the endpoint's thread, with a limit on concurrent requests."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from hone.agents.client import EngineClient
from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.metrics import Metrics
from hone.data.types import StopReason
from hone.errors import GenerationError, ProcessError, RequestError
from hone.generation.protocol import Alternatives, Completion, GenerationRequest, Progress

T = TypeVar("T")
log = logging.getLogger("hone.serve")


class Gateway:
    """Gateway from the endpoint's thread to the event loop on which the engine runs.

    Decoding blocks a loop for several steps at a time; in a separate thread the endpoint stays responsive.
    """

    def __init__(
        self,
        client: EngineClient,
        loop: asyncio.AbstractEventLoop,  # the engine's event loop
        *,
        most_waiting: int = 16384,  # maximum number of concurrent requests; further ones get status 503, to be retried
        # counters of the gateway before, which this one continues; None starts new ones
        metrics: Metrics | None = None,
    ) -> None:
        self.client, self.loop, self.most_waiting = client, loop, most_waiting
        self.under_way = 0  # number of running requests
        self.metrics = metrics or Metrics()  # counters of requests and replies
        self.metrics.follow(lambda: self.under_way, lambda: client.engine.describe().stats)

    async def complete(self, request: GenerationRequest) -> Completion:
        """Return a request's completion, awaited on the endpoint's loop. Cancelling the caller aborts the request."""
        if self.under_way >= self.most_waiting:
            raise ApiError(
                503,
                f"{self.under_way} requests are running, the maximum of this server; try again later",
                code="overloaded",
            )
        if request.progress is not None:
            request = dataclasses.replace(request, progress=self._from_engine(request.progress))
        self.under_way += 1
        started = time.perf_counter()
        try:
            completion = await self.on_engine(self.client.complete(request))
        except RequestError as error:
            raise bad_request(f"{error.what}; {error.why}", error.field or None) from error
        except GenerationError as error:
            log.error("a request failed in the engine", exc_info=error)
            raise ApiError(500, f"the engine failed: {error.what}", code="engine_failed") from error
        except ProcessError as error:
            raise ApiError(503, error.what, code="engine_lost") from error
        finally:
            self.under_way -= 1
        if completion.stop_reason in (StopReason.ABORTED, StopReason.ERROR):
            raise ApiError(503, "the engine aborted the reply before its end; try again", code="aborted")
        self.metrics.count_reply(request, completion, started)
        return completion

    async def end_session(self, name: str) -> None:
        await self.on_engine(self.client.end_sessions([name]))

    async def on_engine(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def _from_engine(self, progress: Progress) -> Progress:
        """Return ``progress`` wrapped such that it always runs on the endpoint's loop."""
        endpoint_loop = asyncio.get_running_loop()

        def forward(ids: list[int], log_probs: list[float], alternatives: list[Alternatives]) -> None:
            endpoint_loop.call_soon_threadsafe(progress, ids, log_probs, alternatives)

        return forward
