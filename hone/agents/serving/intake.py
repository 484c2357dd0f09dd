"""Bodies of requests, as bytes: bounds on their size, on the time that they take, and on the number of their values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from hone.agents.serving.errors import ApiError, bad_request

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
