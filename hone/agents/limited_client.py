"""Engine client with a limit on its requests at once, which leaves the rest of the engine to other clients."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable

from hone.agents.client import EngineClient
from hone.generation.protocol import Completion, Engine, GenerationRequest


class LimitedClient(EngineClient):
    """Client whose further requests wait, first come, first served, while as many as ``limit()`` are under way; None means none."""

    def __init__(self, engine: Engine, limit: Callable[[], int | None]) -> None:
        super().__init__(engine)
        self.under_way = 0  # number of requests in the engine
        self._limit, self._queue = limit, deque[asyncio.Future[None]]()

    async def complete(self, request: GenerationRequest) -> Completion:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self.admit()
        try:
            await place
            request = dataclasses.replace(
                request, request_id=f"limited/{request.request_id}"
            )  # not that of another client
            return await super().complete(request)
        finally:
            if not place.cancelled():  # else it had no place
                self.under_way -= 1
                self.admit()

    def admit(self) -> None:
        """Admit waiting requests as the limit allows; called after a change of the limit."""
        while self._queue and self._has_place():
            place = self._queue.popleft()
            if not place.cancelled():
                self.under_way += 1
                place.set_result(None)

    def _has_place(self) -> bool:
        limit = self._limit()
        return limit is None or self.under_way < limit
