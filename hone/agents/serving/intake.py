"""Bodies of requests, as bytes: bounds on their size, on the time that they take, and on the number of their values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from hone.agents.serving.errors import ApiError, bad_request

MAX_REQUEST_BYTES = 32 * 2**20
"""Maximum size of a request body."""
BODY_SECONDS = 60.0
"""Time limit for a request body to arrive."""
MAX_VALUES = 2**18
"""Maximum number of values and escapes in a body of JSON; a long prompt of token ids may have more.

Decoding holds the interpreter: a body of 32 MB is decoded in 0.01 s if it is one text, and in 5 s if it is ten million lists.
"""


async def read_body(chunks: AsyncIterator[bytes], declared: str | None, grow: Callable[[int], None]) -> bytes:
    """Read a request body.

    Args:
        chunks: parts of the body as they arrive.
        declared: value of the header ``Content-Length``.
        grow: called with the size so far, before a part is kept.

    Raises:
        ApiError: the body is too large or too slow.
    """
    if declared is not None and declared.isdecimal() and int(declared[:20]) > MAX_REQUEST_BYTES:
        raise _too_large()
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in chunks:
                size += len(part)
                if size > MAX_REQUEST_BYTES:
                    raise _too_large()
                grow(size)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive within {BODY_SECONDS:g} s", code="request_timeout") from None
    return b"".join(parts)


def check_structure(body: bytes, max_tokens: int) -> None:
    """Check that a body of JSON has few enough values, by counting the characters that begin or part them.

    Args:
        body: as it arrived.
        max_tokens: context length of the model: a prompt may be as many numbers.

    Raises:
        ApiError: it has too many.
    """
    allowed = max(MAX_VALUES, 2 * max_tokens)
    values = sum(body.count(mark) for mark in (b",", b"[", b"{", b"\\"))
    if values > allowed:
        raise bad_request(
            f"the request has about {values} JSON values and escapes, of at most {allowed}; send it in parts, and text as UTF-8",
            code="request_too_large",
        )


def _too_large() -> ApiError:
    return ApiError(413, f"the request is larger than {MAX_REQUEST_BYTES} bytes", code="request_too_large")
