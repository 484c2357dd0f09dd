"""Bodies of requests: bounds on their size, time and number of values, and the threads in which they are processed."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from hone.agents.serving.errors import ApiError, bad_request

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
    """Two threads next to the endpoint's event loop, and the memory of large bodies.

    The loop only moves bytes. Whatever takes time in proportion to a request runs here: ordinary requests in one thread, in
    the order of their arrival, and large ones in another, so that they wait for each other and not in front of the ordinary.
    """

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


BYTES_PER_TOKEN = 256
"""Bytes of a request body per token of the context length; text of people has about 4, so this is 64 full contexts."""
MIN_REQUEST_BYTES, MAX_REQUEST_BYTES = 2**20, 32 * 2**20
"""Bounds of the maximum size of a request body."""
BODY_SECONDS = 60.0
"""Time limit for a request body to arrive."""
MAX_VALUES = 2**18
"""Maximum number of values and escapes in a body of JSON; a long prompt of token ids may have more.

Decoding holds the interpreter: a body of 32 MB is decoded in 0.01 s if it is one text, and in 5 s if it is ten million lists.
"""


async def read_body(
    chunks: AsyncIterator[bytes], declared: str | None, grow: Callable[[int], Awaitable[None]], max_bytes: int
) -> bytes:
    """Read a request body. One that is too large is read to its end and dropped, so that the connection can stay open.

    ``declared`` is the header ``Content-Length``. ``grow`` is called with the size so far, before a part is kept.

    Raises:
        ApiError: the body is too large or too slow.
    """
    parts, size = [], 0
    is_kept = declared is None or not declared.isdecimal() or int(declared[:20]) <= max_bytes
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in chunks:
                size += len(part)
                is_kept = is_kept and size <= max_bytes
                if is_kept:
                    parts.append(part)
                else:
                    parts.clear()
                await grow(size)
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive within {BODY_SECONDS:g} s", code="request_timeout") from None
    if not is_kept:
        raise ApiError(413, f"the request has {size} bytes, of at most {max_bytes}", code="request_too_large")
    return b"".join(parts)


def max_request_bytes(max_tokens: int) -> int:
    """Return the maximum size of a request body: text of many prompts for a model of this context length, within bounds."""
    return min(max(BYTES_PER_TOKEN * max_tokens, MIN_REQUEST_BYTES), MAX_REQUEST_BYTES)


def check_structure(body: bytes, max_tokens: int) -> None:
    """Check that a body of JSON has few enough values, by counting the characters that begin or separate them.

    A prompt may be as many numbers as the model's context.
    """
    allowed = max(MAX_VALUES, 2 * max_tokens)
    values = sum(body.count(mark) for mark in (b",", b"[", b"{", b"\\"))
    if values > allowed:
        raise bad_request(
            f"the request has about {values} JSON values and escapes, of at most {allowed}; send it in parts, and text as UTF-8",
            code="request_too_large",
        )
