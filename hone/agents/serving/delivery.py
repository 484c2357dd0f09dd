"""Delivery of answers: complete while the caller is connected, or as server-sent events; and the form of every error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from hone.agents.serving.errors import ApiError
from hone.agents.serving.session import Session
from hone.errors import ConfigError
from hone.generation.protocol import GenerationRequest

log = logging.getLogger("hone.serve")
T = TypeVar("T")


class Call(Protocol):
    """Request that the engine answers."""

    streams: bool  # True if the caller wants chunks
    headers: dict[str, str]
    requests: list[GenerationRequest]

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer as one object."""
        ...

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer in chunks; one with a ``type`` is an event of that name."""
        ...

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the last chunk of an answer that fails."""
        ...


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await ``work``; cancel it and raise ApiError if the caller disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client disconnected", code="client_closed_request")
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        with contextlib.suppress(BaseException):
            await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events(call: Call, session: Session | None) -> AsyncIterator[bytes]:
    """Format chunks as server-sent events; a late error is an event too, since the status has been sent."""
    typed = False
    try:
        async for chunk in call.chunks():
            typed = "type" in chunk
            yield _event(chunk)
    except Exception as error:  # noqa: BLE001 - the error is the last event
        if session is not None:
            session.counts["failed"] += 1
        yield _event(call.failure(as_api_error(error)))
    if not typed:
        yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return name.encode() + b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def as_api_error(error: BaseException) -> ApiError:
    """Return the answer to a request that failed; a bug is logged, and does not end the connection."""
    while isinstance(error, BaseExceptionGroup):
        error = next((one for one in error.exceptions if isinstance(one, ApiError)), error.exceptions[0])
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):  # the request needs a package that the server does not have
        return ApiError(501, f"{error.what}; {error.fix}", code="not_supported")
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"bug in the server: {type(error).__name__}: {error}", code="internal_error")
