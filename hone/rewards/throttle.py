"""Limits on calls of a service: how many at one time, and how many a minute."""

from __future__ import annotations

import asyncio
import time


class Throttle:
    """Lets calls through: ``async with throttle: ...``.

    It may be used in one event loop after another, as programs that call ``asyncio.run`` several times do. Calls of a minute
    are spaced evenly, so that a service never sees a burst.

    Args:
        max_concurrent: calls at one time; None is no limit.
        per_minute: calls begun in a minute; None is no limit.
    """

    def __init__(self, max_concurrent: int | None = None, per_minute: float | None = None) -> None:
        self.max_concurrent = max_concurrent
        self._pause = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(1)

    @property
    def limits(self) -> bool:
        """Whether anything is limited."""
        return self.max_concurrent is not None or self._pause > 0

    def wait_of(self, calls: int) -> float:
        """Seconds until the last of so many calls may begin, as far as their number a minute decides."""
        return self._pause * calls

    async def __aenter__(self) -> None:
        if self.max_concurrent is not None:
            await self._here().acquire()
        if self._pause:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + self._pause
            try:
                await asyncio.sleep(begin - now)
            except asyncio.CancelledError:
                self._release()
                raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _here(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._places = loop, asyncio.Semaphore(self.max_concurrent or 1)
        return self._places

    def _release(self) -> None:
        if self.max_concurrent is not None:
            self._places.release()
