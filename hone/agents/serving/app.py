"""HTTP routes of the endpoint: authorization, sessions, answers and errors."""

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

from hone.agents.serving.chat import ChatCall
from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.intake import check_structure, max_request_bytes, read_body
from hone.agents.serving.replicas import ReplicaRoutes
from hone.agents.serving.service import Service
from hone.agents.serving.session import Session
from hone.agents.serving.sessions import Sessions
from hone.agents.serving.text import TextCall
from hone.agents.serving.wire import ChatBody, TextBody, decode, parse
from hone.agents.serving.workers import Workers

log = logging.getLogger("hone.serve")

REFUSAL_SECONDS = 0.01
"""Delay of the answer to a bad request: a connection that sends nothing else then takes little time from the others."""


class Endpoint:
    """Endpoint as an ASGI application (:attr:`app`).

    ======================================  =======================================================================
    ``GET  /health``                        works without a token
    ``     /replicas``                      replicas of the engine (:mod:`hone.agents.serving.replicas`)
    ``GET  /v1/models``
    ``POST /v1/chat/completions``           recorded when the API key is a session's
    ``POST /v1/completions``
    ``     /sessions/<id>/v1/...``          the same, recorded in that session; the first call opens it
    ``GET  /sessions/<id>``                 conversations of the session as tokens
    ``DELETE /sessions/<id>``               end the session
    ======================================  =======================================================================

    Args:
        service: service that answers.
        token: access token that callers must send; None allows every caller.
        sessions: recorded sessions.
    """

    def __init__(self, service: Service, *, token: str | None = None, sessions: Sessions | None = None) -> None:
        self.service, self.token = service, token
        self.sessions = sessions or Sessions()
        self._numbers = itertools.count(1)
        self._workers = Workers()
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
        """Report that the endpoint works, and the number of running requests."""
        return JSONResponse({"status": "ok", "under_way": self.service.gateway.under_way})

    async def models(self, request: Request) -> Response:
        """List the one model."""
        self._session_of(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """Describe the model, by name."""
        self._session_of(request)
        self.service.check_model(request.path_params["name"])
        return JSONResponse(self._card())

    async def chat(self, request: Request) -> Response:
        """Answer ``/v1/chat/completions``."""
        return await self._answer(request, ChatBody, ChatCall)

    async def text(self, request: Request) -> Response:
        """Answer ``/v1/completions``."""
        return await self._answer(request, TextBody, TextCall)

    async def show(self, request: Request) -> Response:
        """Return the conversations of a session as tokens."""
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
        try:
            call = await self._call(request, kind, call_of, session)
            if call.body.stream:
                return StreamingResponse(_events(call.chunks(), session), media_type="text/event-stream")
            return JSONResponse(await _while_connected(request, call.whole()))
        except Exception as error:
            if session is not None:
                session.counts["failed"] += 1
            refusal = _as_api_error(error)
            if refusal.status < 500:
                await asyncio.sleep(REFUSAL_SECONDS)
            raise refusal from error

    async def _call(
        self, request: Request, kind: Any, call_of: Callable[..., ChatCall | TextCall], session: Session | None
    ) -> ChatCall | TextCall:
        """Read a request and make its call in a thread."""

        def make(body: bytes) -> ChatCall | TextCall:
            check_structure(body, self.service.max_model_len)
            fields = parse(kind, decode(body))
            if session is not None:
                session.counts["calls"] += 1
            return call_of(self.service, session, fields, str(next(self._numbers)))

        max_bytes = max_request_bytes(self.service.max_model_len)
        with self._workers.holding(max_bytes) as grow:
            try:
                body = await read_body(request.stream(), request.headers.get("content-length"), grow, max_bytes)
            except ClientDisconnect as error:
                raise bad_request("the client disconnected") from error
            return await self._workers.run(len(body), make, body)

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
        """Return the session of a call, or None if the call is not recorded.

        Raises:
            ApiError: the caller has no access.
        """
        key = _bearer(request)
        by_key = self.sessions.by_key(key)
        if by_key is None:
            self._check_token(key)
        name = request.path_params.get("session")
        if name is None:
            return by_key
        if by_key is not None and by_key.name != name:
            raise ApiError(401, "this API key belongs to another session", code="invalid_api_key")
        return by_key or self.sessions.named(name)

    def _existing(self, request: Request) -> Session:
        self._check_token(_bearer(request))
        name = request.path_params["session"]
        session = self.sessions.find(name)
        if session is None:
            raise ApiError(404, f"session '{name}' does not exist", code="session_not_found")
        return session

    def _check_token(self, given: str) -> None:
        if self.token is not None and not hmac.compare_digest(given.encode(), self.token.encode()):
            raise ApiError(401, "wrong or missing API key: send `Authorization: Bearer <token>`",
                           code="invalid_api_key")  # fmt: skip


def _bearer(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


async def _while_connected(request: Request, work: Any) -> Any:
    """Await ``work``, and cancel it if the caller disconnects."""
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


async def _events(chunks: AsyncIterator[dict[str, Any]], session: Session | None) -> AsyncIterator[bytes]:
    """Format chunks as server-sent events; a late error is an event too, since the status has been sent."""
    try:
        async for chunk in chunks:
            yield b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
    except Exception as error:  # noqa: BLE001 - the error is the last event
        if session is not None:
            session.counts["failed"] += 1
        yield b"data: " + json.dumps(_as_api_error(error).body()).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _as_api_error(error: BaseException) -> ApiError:
    """Return the answer to a request that failed; a bug is logged, and does not end the connection."""
    while isinstance(error, BaseExceptionGroup):
        error = next((one for one in error.exceptions if isinstance(one, ApiError)), error.exceptions[0])
    if isinstance(error, ApiError):
        return error
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"bug in the server: {type(error).__name__}: {error}", code="internal_error")


async def _api_error(request: Request, error: Any) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 503:
        headers["Retry-After"] = "1"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _http_error(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message, code="not_found").body(), status_code=error.status_code)


async def _bug(request: Request, error: Exception) -> Response:
    answer = _as_api_error(error)
    return JSONResponse(answer.body(), status_code=answer.status)
