"""HTTP routes of the endpoint: authorization, sessions, answers and errors."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from hone import __version__
from hone.agents.serving.chat import ChatCall
from hone.agents.serving.errors import ApiError, bad_request, error_body, is_messages_path, status_of
from hone.agents.serving.gateway import CONTENT_TYPE, CountedApp, Gateway
from hone.agents.serving.messages import CountBody, MessagesBody, MessagesCall, count_tokens
from hone.agents.serving.responses import ResponsesBody, ResponsesCall, ResponseStore
from hone.agents.serving.service import Service
from hone.agents.serving.session import Session, Sessions
from hone.agents.serving.swapping import SCOPE, Opened, ReleaseRoutes, ServedApp, Services
from hone.agents.serving.text import DetokenizeBody, TextCall, TokenizeBody, detokenize, tokenize, tokenizer_info
from hone.agents.serving.wire import (
    ChatBody,
    TextBody,
    Workers,
    check_structure,
    decode,
    max_request_bytes,
    parse,
    read_body,
)
from hone.errors import ConfigError
from hone.generation.pool import EnginePool
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


class ReplicaRoutes:
    """Routes below ``/replicas``; ``check`` raises if the caller has no access."""

    def __init__(self, gateway: Callable[[], Gateway], check: Callable[[Request], None]) -> None:
        self._gateway, self._check = gateway, check
        self.routes = [
            Route("/replicas", self.show, methods=["GET"]),
            Route("/replicas/{index:int}/drain", self.drain, methods=["POST"]),
            Route("/replicas/{index:int}/admit", self.admit, methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        return JSONResponse({"replicas": await self._reports(self._pool(request))})

    async def drain(self, request: Request) -> Response:
        """Give a replica no new requests; answer when its current ones have finished."""
        pool, index = self._replica(request)
        await self._gateway().on_engine(pool.drain(index))
        return JSONResponse((await self._reports(pool))[index])

    async def admit(self, request: Request) -> Response:
        pool, index = self._replica(request)

        async def admit() -> None:
            pool.admit(index)

        await self._gateway().on_engine(admit())
        return JSONResponse((await self._reports(pool))[index])

    async def _reports(self, pool: EnginePool) -> list[dict[str, Any]]:
        async def reports() -> list[dict[str, Any]]:
            return [replica.report() for replica in pool.replicas]

        return await self._gateway().on_engine(reports())

    def _pool(self, request: Request) -> EnginePool:
        self._check(request)
        engine = self._gateway().client.engine
        if not isinstance(engine, EnginePool):
            raise ApiError(404, "the engine runs in this process and has no replicas", code="no_replicas")
        return engine

    def _replica(self, request: Request) -> tuple[EnginePool, int]:
        pool, index = self._pool(request), request.path_params["index"]
        if index >= len(pool.replicas):
            raise ApiError(
                404, f"replica {index} does not exist; replicas: 0 to {len(pool.replicas) - 1}", code="no_replicas"
            )
        return pool, index


SERVED = (
    "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /tokenize, /detokenize, /tokenizer_info, /metrics, "
    "/version, /health and /sessions/<id>"
)
ANOTHER_KIND = {
    "/v1/embeddings": "embeddings",
    "/v1/audio": "speech",
    "/v1/images": "images",
    "/v1/moderations": "moderation",
    "/v1/rerank": "scores of documents",
    "/v1/score": "scores of texts",
    "/pooling": "embeddings",
    "/classify": "classes",
    "/score": "scores of texts",
    "/rerank": "scores of documents",
}
"""What the paths below a prefix give."""
ANOTHER_SERVICE = ("/v1/files", "/v1/uploads", "/v1/batches", "/v1/fine_tuning", "/v1/vector_stores", "/v1/assistants",
                   "/v1/threads", "/v1/realtime", "/v1/conversations", "/v1/evals")  # fmt: skip
"""Prefixes of OpenAI's services apart from a model."""


def no_such_path(method: str, path: str) -> ApiError:
    """Return the error for a path without a route."""
    kind = next((kind for prefix, kind in ANOTHER_KIND.items() if _is_below(path, prefix)), None)
    if kind is not None:
        problem = f"this server's model generates text, and {path} is for {kind}"
    elif any(_is_below(path, prefix) for prefix in ANOTHER_SERVICE):
        problem = f"{path} is a service of OpenAI that this server does not have"
    else:
        problem = f"{method} {path} does not exist"
    return ApiError(404, f"{problem}; served are {SERVED}", code="not_found")


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


B = TypeVar("B", bound=BaseModel)
R = TypeVar("R")

REFUSAL_SECONDS = 0.01
"""Delay of the answer to a bad request: a connection that sends nothing else then takes little time from the others."""


async def _nothing() -> None:
    """Free nothing."""


class Endpoint:
    """Endpoint as an ASGI application (:attr:`app`).

    ======================================  =======================================================================
    ``GET  /health``                        works without a token
    ``GET  /version``                       version of Hone
    ``GET  /metrics``                       counters in the format of Prometheus
    ``POST /tokenize``, ``/detokenize``     tokens of a prompt, text of tokens
    ``GET  /tokenizer_info``                special tokens and chat template
    ``     /replicas``                      replicas of the engine (:class:`ReplicaRoutes`)
    ``     /release``                       release that is served (:mod:`hone.agents.serving.swapping`)
    ``GET  /v1/models``
    ``POST /v1/chat/completions``           recorded when the API key is a session's
    ``POST /v1/completions``
    ``POST /v1/responses``                  and ``GET``, ``DELETE /v1/responses/<id>``
    ``POST /v1/messages``                   and ``POST /v1/messages/count_tokens``
    ``     /sessions/<id>/v1/...``          the same, recorded in that session; the first call opens it
    ``GET  /sessions/<id>``                 conversations of the session as tokens
    ``DELETE /sessions/<id>``               end the session
    ======================================  =======================================================================
    """

    def __init__(
        self,
        service: Service,
        *,
        token: str | None = None,  # access token that callers must send; None allows every caller
        sessions: Sessions | None = None,
        # loads a release of the shelf that the model belongs to; None for another model
        open_release: Callable[[int, Service], Awaitable[Opened]] | None = None,
        close: Callable[[], Awaitable[None]] = _nothing,  # frees the engine of ``service`` after a swap
    ) -> None:
        self.services, self.token = Services(service), token
        self.sessions = sessions or Sessions()
        self._numbers = itertools.count(1)
        self.responses = ResponseStore()
        self._workers = Workers()
        api = [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.text, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/responses/{response}", self.response, methods=["GET", "DELETE"]),
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]
        app = Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/version", self.version, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
                *ReplicaRoutes(lambda: self.services.current.gateway, self._check_caller).routes,
                *ReleaseRoutes(self.services, self._check_caller, open_release, close).routes,
                Route("/sessions/{session}", self.show, methods=["GET"]),
                Route("/sessions/{session}", self.forget, methods=["DELETE"]),
                Mount("/sessions/{session}", routes=api),
                *api,
            ],
            exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _bug},
        )
        self.app = CountedApp(ServedApp(app, self.services), service.gateway.metrics)

    # routes ----------------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Report that the endpoint works, and the number of running requests."""
        return JSONResponse({"status": "ok", "under_way": _service(request).gateway.under_way})

    async def version(self, request: Request) -> Response:
        self._session_of(request)
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """Return the metrics; a remote engine may take its time to report its state."""
        self._session_of(request)
        text = await asyncio.to_thread(_service(request).gateway.metrics.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def tokenize(self, request: Request) -> Response:
        return await self._convert(request, TokenizeBody, tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._convert(request, DetokenizeBody, detokenize)

    async def tokenizer_info(self, request: Request) -> Response:
        self._session_of(request)
        return JSONResponse(tokenizer_info(_service(request)))

    async def models(self, request: Request) -> Response:
        self._session_of(request)
        return JSONResponse({"object": "list", "data": [_card(_service(request))]})

    async def model(self, request: Request) -> Response:
        self._session_of(request)
        _service(request).check_model(request.path_params["name"])
        return JSONResponse(_card(_service(request)))

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody, ChatCall)

    async def text(self, request: Request) -> Response:
        return await self._answer(request, TextBody, TextCall)

    async def respond(self, request: Request) -> Response:
        return await self._answer(request, ResponsesBody, partial(ResponsesCall, store=self.responses))

    async def response(self, request: Request) -> Response:
        """Return or forget a stored response."""
        session, name = self._session_of(request), request.path_params["response"]
        owner = session.name if session else None
        if request.method == "DELETE":
            self.responses.delete(name, owner)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return JSONResponse(self.responses.get(name, owner).response)

    async def messages(self, request: Request) -> Response:
        return await self._answer(request, MessagesBody, MessagesCall)

    async def count_tokens(self, request: Request) -> Response:
        return await self._convert(request, CountBody, count_tokens)

    async def show(self, request: Request) -> Response:
        """Return the conversations of a session as tokens."""
        return JSONResponse(self._existing(request).as_json())

    async def forget(self, request: Request) -> Response:
        session = self._existing(request)
        self.sessions.close(session)
        await _service(request).gateway.end_session(session.name)
        return JSONResponse({"id": session.name, "deleted": True})

    # the work --------------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, kind: type[B], call_of: Callable[..., Call]) -> Response:
        """Answer a request by a call of the engine, complete or streamed."""
        session, service = self._session_of(request), _service(request)

        def make(fields: B) -> Call:
            if session is not None:
                session.counts["calls"] += 1
            return call_of(service, session, fields, str(next(self._numbers)))

        try:
            call = await self._read(request, kind, make)
            if call.streams:
                await service.check_constraints(call.requests)  # while the answer can have a status
                return StreamingResponse(events(call, session), media_type="text/event-stream", headers=call.headers)
            return JSONResponse(await while_connected(request, call.whole()), headers=call.headers)
        except Exception as error:
            if session is not None:
                session.counts["failed"] += 1
            raise await _delayed(error) from error

    async def _convert(self, request: Request, kind: type[B], work: Callable[[Service, B], dict[str, Any]]) -> Response:
        """Answer a request without the engine."""
        self._session_of(request)
        try:
            return JSONResponse(await self._read(request, kind, lambda fields: work(_service(request), fields)))
        except Exception as error:
            raise await _delayed(error) from error

    async def _read(self, request: Request, kind: type[B], make: Callable[[B], R]) -> R:
        """Read a request, and process its fields with ``make`` in a thread."""

        length = _service(request).max_model_len

        def process(body: bytes) -> R:
            check_structure(body, length)
            return make(parse(kind, decode(body)))

        max_bytes = max_request_bytes(length)
        with self._workers.holding(max_bytes) as grow:
            try:
                body = await read_body(request.stream(), request.headers.get("content-length"), grow, max_bytes)
            except ClientDisconnect as error:
                raise bad_request("the client disconnected") from error
            return await self._workers.run(len(body), process, body)

    # who calls -------------------------------------------------------------------------------------------------------

    def _session_of(self, request: Request) -> Session | None:
        """Return the session of a call, or None if the call is not recorded."""
        key = _key_of(request)
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
        self._check_caller(request)
        name = request.path_params["session"]
        session = self.sessions.find(name)
        if session is None:
            raise ApiError(404, f"session '{name}' does not exist", code="session_not_found")
        return session

    def _check_caller(self, request: Request) -> None:
        self._check_token(_key_of(request))

    def _check_token(self, given: str) -> None:
        if self.token is not None and not hmac.compare_digest(given.encode(), self.token.encode()):
            raise ApiError(401, "wrong or missing API key: send `Authorization: Bearer <token>`",
                           code="invalid_api_key")  # fmt: skip


def _service(request: Request) -> Service:
    service: Service = request.scope[SCOPE]
    return service


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": 0,
        "owned_by": "hone",
        "max_model_len": service.max_model_len,
    }


def _key_of(request: Request) -> str:
    """Return the API key of a request, as OpenAI's or as Anthropic's clients send it."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if kind.lower() == "bearer" else ""
    return bearer or request.headers.get("x-api-key", "").strip()


async def _delayed(error: Exception) -> ApiError:
    """Return the answer to a request that failed; a refusal after :data:`REFUSAL_SECONDS`."""
    refusal = as_api_error(error)
    if refusal.status < 500:
        await asyncio.sleep(REFUSAL_SECONDS)
    return refusal


async def _api_error(request: Request, error: Any) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 503:
        headers["Retry-After"] = "1"
    return _in_form(request, error, headers)


def _in_form(request: Request, error: ApiError, headers: dict[str, str] | None = None) -> Response:
    if is_messages_path(request.url.path):
        return JSONResponse(error_body(error), status_code=status_of(error), headers=headers)
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _http_error(request: Request, error: Any) -> Response:
    if error.status_code == 404:
        return await _api_error(request, no_such_path(request.method, request.url.path))
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _in_form(request, ApiError(error.status_code, message, code="method_not_allowed"))


async def _bug(request: Request, error: Exception) -> Response:
    return _in_form(request, as_api_error(error))
