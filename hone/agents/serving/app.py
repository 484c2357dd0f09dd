"""The routes: who may call, which session a call belongs to, and what every answer and error looks like."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from hone.agents.serving.asking import Service
from hone.agents.serving.chat import ChatCall
from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.replicas import ReplicaRoutes
from hone.agents.serving.session import Session
from hone.agents.serving.sessions import Sessions
from hone.agents.serving.text import TextCall
from hone.agents.serving.wire import ChatBody, TextBody, parse

log = logging.getLogger("hone.serve")

MOST_BYTES = 32 * 2**20
"""Largest request body."""


class Endpoint:
    """The endpoint as an ASGI application (:attr:`app`).

    ======================================  =======================================================================
    ``GET  /health``                        no token asked for
    ``     /replicas``                      those of the engine (:mod:`hone.agents.serving.replicas`)
    ``GET  /v1/models``
    ``POST /v1/chat/completions``           recorded when the API key is a session's
    ``POST /v1/completions``
    ``     /sessions/<id>/v1/...``          the same, recorded in that session, which begins with its first call
    ``GET  /sessions/<id>``                 its conversations as tokens
    ``DELETE /sessions/<id>``               forget it
    ======================================  =======================================================================

    Args:
        service: answers.
        token: that callers must bear; None lets everybody in who can reach the port.
        sessions: conversations that are recorded.
    """

    def __init__(self, service: Service, *, token: str | None = None, sessions: Sessions | None = None) -> None:
        self.service, self.token = service, token
        self.sessions = sessions or Sessions()
        self._numbers = itertools.count(1)
        api = [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.text, methods=["POST"]),
        ]
        self.app = Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                *ReplicaRoutes(service.gateway, lambda request: self._check_token(_bearer(request))).routes,
                Route("/sessions/{session}", self.show, methods=["GET"]),
                Route("/sessions/{session}", self.forget, methods=["DELETE"]),
                Mount("/sessions/{session}", routes=api),
                *api,
            ],
            exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _bug},
        )

    # routes ----------------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Whether the endpoint answers, and what is under way."""
        return JSONResponse({"status": "ok", "under_way": self.service.gateway.under_way})

    async def models(self, request: Request) -> Response:
        """The one model there is."""
        self._session_of(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """The model, by name."""
        self._session_of(request)
        self.service.check_model(request.path_params["name"])
        return JSONResponse(self._card())

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        return await self._answer(request, ChatBody, ChatCall)

    async def text(self, request: Request) -> Response:
        """``/v1/completions``."""
        return await self._answer(request, TextBody, TextCall)

    async def show(self, request: Request) -> Response:
        """The conversations of a session as tokens."""
        return JSONResponse(self._existing(request).as_json())

    async def forget(self, request: Request) -> Response:
        """End a session."""
        session = self._existing(request)
        self.sessions.close(session)
        await self.service.gateway.end_session(session.name)
        return JSONResponse({"id": session.name, "deleted": True})

    # the work --------------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, kind: Any, call_of: Callable[..., ChatCall | TextCall]) -> Response:
        session = self._session_of(request)
        body = parse(kind, await _json(request))
        if session is not None:
            session.counts["calls"] += 1
        try:
            call = call_of(self.service, session, body, str(next(self._numbers)))
            if body.stream:
                return StreamingResponse(_events(call.pieces(), session), media_type="text/event-stream")
            return JSONResponse(await _while_connected(request, call.whole()))
        except ExceptionGroup as group:
            raise (_first_api_error(group) or group) from group
        except ApiError:
            if session is not None:
                session.counts["failed"] += 1
            raise

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.service.model,
            "object": "model",
            "created": 0,
            "owned_by": "hone",
            "max_model_len": self.service.max_model_len,
        }

    # who calls -------------------------------------------------------------------------------------------------------

    def _session_of(self, request: Request) -> Session | None:
        """The session of a call, None for one that is not recorded.

        Raises:
            ApiError: the caller may not.
        """
        key = _bearer(request)
        by_key = self.sessions.by_key(key)
        if by_key is None:
            self._check_token(key)
        name = request.path_params.get("session")
        if name is None:
            return by_key
        if by_key is not None and by_key.name != name:
            raise ApiError(401, "this API key is another session's", code="invalid_api_key")
        return by_key or self.sessions.named(name)

    def _existing(self, request: Request) -> Session:
        self._check_token(_bearer(request))
        name = request.path_params["session"]
        session = self.sessions.find(name)
        if session is None:
            raise ApiError(404, f"there is no session '{name}'", code="session_not_found")
        return session

    def _check_token(self, given: str) -> None:
        if self.token is not None and not hmac.compare_digest(given.encode(), self.token.encode()):
            raise ApiError(401, "the API key is wrong or missing: send `Authorization: Bearer <token>`",
                           code="invalid_api_key")  # fmt: skip


def _bearer(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


async def _json(request: Request) -> Any:
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MOST_BYTES:
                raise ApiError(413, f"the request is larger than {MOST_BYTES} bytes", code="request_too_large")
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise bad_request("the client went away") from error
    try:
        return json.loads(b"".join(chunks))
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the request is no JSON: {error}", code="invalid_json") from None


async def _while_connected(request: Request, work: Any) -> Any:
    """Await ``work``, and give it up when the caller goes away: an answer that nobody gets is not computed."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client went away", code="client_closed_request")
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        with contextlib.suppress(BaseException):
            await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(pieces: AsyncIterator[dict[str, Any]], session: Session | None) -> AsyncIterator[bytes]:
    """Server-sent events; an error after the first is one too, for the status has been sent."""
    try:
        async for piece in pieces:
            yield b"data: " + json.dumps(piece, separators=(",", ":")).encode() + b"\n\n"
    except ApiError as error:
        if session is not None:
            session.counts["failed"] += 1
        yield b"data: " + json.dumps(error.body()).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _first_api_error(group: ExceptionGroup) -> ApiError | None:
    return next((error for error in group.exceptions if isinstance(error, ApiError)), None)


async def _api_error(request: Request, error: Any) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 503:
        headers["Retry-After"] = "1"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _http_error(request: Request, error: Any) -> Response:
    what = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, what, code="not_found").body(), status_code=error.status_code)


async def _bug(request: Request, error: Exception) -> Response:
    log.error("a request broke", exc_info=error)
    broken = ApiError(500, f"a bug in the server: {type(error).__name__}: {error}", code="internal_error")
    return JSONResponse(broken.body(), status_code=500)
