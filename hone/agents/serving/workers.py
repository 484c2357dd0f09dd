"""Threads next to the endpoint's event loop, where requests are decoded, rendered and tokenized.

The loop only moves bytes. Whatever takes time in proportion to a request runs here, in two threads: one for ordinary requests, in the
order of their arrival, and one for large requests, which wait for each other and not in front of ordinary ones.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from hone.agents.serving.errors import ApiError

LARGE_BYTES = 64 * 2**10
"""Size of a body from which a request is large."""
MAX_HELD_BYTES = 128 * 2**20
"""Maximum of all large bodies in memory; further ones get status 503, to be retried."""
LARGE_BYTES_PER_SECOND = 32 * 2**20
"""Rate at which large bodies arrive, all together. Faster ones would keep the interpreter from the engine's thread."""
TRIM_SECONDS = 0.5
"""Seconds from the end of a large request until its memory goes back to the system."""

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Two threads, and the memory of large bodies."""

    def __init__(self) -> None:
        self._ordinary = ThreadPoolExecutor(1, "hone-requests")
        self._large = ThreadPoolExecutor(1, "hone-large-requests")
        self._turn = asyncio.Lock()
        self._trim_is_due = False
        self.held = 0  # bytes of large bodies in memory

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` for a request with a body of ``size`` bytes; return its result."""
        loop = asyncio.get_running_loop()
        pool = self._large if size > LARGE_BYTES else self._ordinary
        try:
            return await loop.run_in_executor(pool, lambda: work(*args, **kwargs))
        finally:
            if size > LARGE_BYTES and not self._trim_is_due:
                self._trim_is_due = True
                loop.call_later(TRIM_SECONDS, self._trim)

    @contextmanager
    def holding(self, max_bytes: int) -> Iterator[Callable[[int], Awaitable[None]]]:
        """Yield a function to await with the size of a body as it grows; large bodies arrive at a bounded rate, in turns.

        Raises:
            ApiError: in that function, too many large bodies are in memory.
        """
        counted = arrived = 0

        async def grow(size: int) -> None:
            nonlocal counted, arrived
            if size <= LARGE_BYTES:
                return
            added = min(size, max_bytes) - counted
            if self.held + added > MAX_HELD_BYTES:
                raise ApiError(
                    503,
                    f"large requests of {self.held} bytes are being read, of at most {MAX_HELD_BYTES}; try again later",
                    code="overloaded",
                )
            self.held += added
            counted += added
            async with self._turn:
                await asyncio.sleep((size - arrived) / LARGE_BYTES_PER_SECOND)
            arrived = size

        try:
            yield grow
        finally:
            self.held -= counted

    def _trim(self) -> None:
        self._trim_is_due = False
        self._large.submit(return_free_memory)


def return_free_memory() -> None:
    """Give freed memory back to the system: glibc keeps it for this process otherwise. Other C libraries do so themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
