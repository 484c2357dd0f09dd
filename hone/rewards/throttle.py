"""Limits on service calls: concurrent calls, and calls per minute."""

from __future__ import annotations

import asyncio
import time


class Throttle:
    """Throttle of calls: ``async with throttle: ...``.

    It may be used in successive event loops, as programs that call ``asyncio.run`` several times do. Calls per minute are spaced
    evenly, so that a service never receives a burst.

    Args:
        max_concurrent: maximum concurrent calls; None means unlimited.
        per_minute: maximum calls started per minute; None means unlimited.
    """

    def __init__(self, max_concurrent: int | None = None, per_minute: float | None = None) -> None:
        self.max_concurrent = max_concurrent
        self._pause = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore = asyncio.Semaphore(1)

    @property
    def limits(self) -> bool:
        """True if there is any limit."""
        return self.max_concurrent is not None or self._pause > 0

    def wait_seconds(self, calls: int) -> float:
        """Return the seconds until the last of ``calls`` calls may start under the limit per minute."""
        return self._pause * calls

    async def __aenter__(self) -> None:
        if self.max_concurrent is not None:
            await self._loop_semaphore().acquire()
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

    def _loop_semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._semaphore = loop, asyncio.Semaphore(self.max_concurrent or 1)
        return self._semaphore

    def _release(self) -> None:
        if self.max_concurrent is not None:
            self._semaphore.release()
