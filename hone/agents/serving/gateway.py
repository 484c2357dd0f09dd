"""The engine as the endpoint asks it: from another thread, with a bound on what waits."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any, TypeVar

from hone.agents.client import EngineClient
from hone.agents.serving.errors import ApiError, bad_request
from hone.data.types import StopReason
from hone.errors import GenerationError, ProcessError
from hone.generation.protocol import Completion, GenerationRequest, Progress

T = TypeVar("T")


class Gateway:
    """Takes requests of the endpoint's thread to the event loop on which the engine runs.

    Decoding keeps a loop busy for a burst of steps at a time; with a thread of its own the endpoint answers meanwhile.

    Args:
        client: asks the engine.
        loop: the engine's event loop.
        most_waiting: requests that may be under way at once; what comes on top is turned away, to be tried again.
    """

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop, *, most_waiting: int = 16384) -> None:
        self.client, self.loop, self.most_waiting = client, loop, most_waiting
        self.under_way = 0

    async def complete(self, request: GenerationRequest) -> Completion:
        """The completion of a request; a caller that is cancelled ends it. Call it on the endpoint's loop.

        Raises:
            ApiError: too many are under way, the request cannot be served, or the engine lost it.
        """
        if self.under_way >= self.most_waiting:
            raise ApiError(
                503, f"{self.under_way} requests are under way, which is all this server takes", code="overloaded"
            )
        if request.progress is not None:
            request = dataclasses.replace(request, progress=self._from_engine(request.progress))
        self.under_way += 1
        try:
            completion = await self.on_engine(self.client.complete(request))
        except GenerationError as error:
            raise bad_request(f"{error.what}; {error.why}") from error
        except ProcessError as error:
            raise ApiError(503, error.what, code="engine_lost") from error
        finally:
            self.under_way -= 1
        if completion.stop_reason in (StopReason.ABORTED, StopReason.ERROR):
            raise ApiError(503, "the engine ended the reply before it was whole; try again", code="aborted")
        return completion

    async def end_session(self, name: str) -> None:
        """Have the engine forget what it keeps of a session."""
        await self.on_engine(self.client.end_sessions([name]))

    async def on_engine(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` gives on the engine's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def _from_engine(self, progress: Progress) -> Progress:
        """``progress``, called on the endpoint's loop whoever calls it."""
        home = asyncio.get_running_loop()

        def forward(ids: list[int], log_probs: list[float]) -> None:
            home.call_soon_threadsafe(progress, ids, log_probs)

        return forward
