"""Replacement of the model of a running endpoint: new requests reach the new one, and earlier requests finish on the old one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.server import Application, Receive, Scope, Send
from hone.agents.serving.service import Service

SCOPE = "hone.service"
"""Key of a request's scope with the service that answers it, from its first byte to its last."""


class Services:
    """Services of one endpoint: the current one, and earlier ones that still answer requests."""

    def __init__(self, service: Service) -> None:
        self.current = service  # service of new requests
        self._users: Counter[int] = Counter()
        self._left: dict[int, asyncio.Future[None]] = {}

    @contextlib.contextmanager
    def using(self) -> Iterator[Service]:
        """Yield the current service, which remains open until the end of the block."""
        service = self.current
        key = id(service)
        self._users[key] += 1
        try:
            yield service
        finally:
            self._users[key] -= 1
            if self._users[key] == 0 and key in self._left:
                self._left[key].set_result(None)

    def users(self, service: Service) -> int:
        return self._users[id(service)]

    async def replace(self, service: Service) -> None:
        """Make a service the current one; return once the one before has answered all its requests."""
        before, self.current = self.current, service
        if self.users(before):
            self._left[id(before)] = asyncio.get_running_loop().create_future()
            await self._left[id(before)]
            del self._left[id(before)]
        del self._users[id(before)]


class ServedApp:
    """ASGI application that gives each request the current service, and tells clients which release answers them."""

    def __init__(self, app: Application, services: Services) -> None:
        self._app, self._services = app, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with one service."""
        if scope["type"] != "http" or scope.get("path") == "/release":
            await self._app(scope, receive, send)
            return
        with self._services.using() as service:
            scope[SCOPE] = service

            async def named(message: Scope) -> None:
                if message["type"] == "http.response.start" and service.release is not None:
                    headers = [*message.get("headers", ()), (b"x-hone-release", str(service.release).encode())]
                    message = {**message, "headers": headers}
                await send(message)

            await self._app(scope, receive, named)


@dataclass(frozen=True)
class Opened:
    """Service of a release that was loaded."""

    service: Service
    close: Callable[[], Awaitable[None]]  # frees the engine of the service


class ReleaseRoutes:
    """Route ``/release``: the release that is served, and a swap to another one."""

    def __init__(
        self,
        services: Services,
        check: Callable[[Request], None],  # function that raises if the caller has no access
        # loads the release of a number; None if the model belongs to no shelf
        open_release: Callable[[int, Service], Awaitable[Opened]] | None,
        close: Callable[[], Awaitable[None]],  # frees the engine of the first service
    ) -> None:
        self._services, self._check, self._open = services, check, open_release
        self._close = close
        self._swap: asyncio.Task[dict[str, Any]] | None = None
        self.routes = [Route("/release", self.show, methods=["GET"]), Route("/release", self.swap, methods=["POST"])]

    async def show(self, request: Request) -> Response:
        """Return the number of the served release; null for a model that belongs to no shelf."""
        self._check(request)
        return JSONResponse({"release": self._services.current.release, "swapping": self._swap is not None})

    async def swap(self, request: Request) -> Response:
        """Load a release, send new requests to it, and answer once the earlier requests have finished."""
        self._check(request)
        if self._open is None:
            raise ApiError(
                404, "the served model is not a release; start the server with SHELF/current", code="no_releases"
            )
        try:
            number = (await request.json())["release"]
        except (ValueError, TypeError, KeyError):
            number = None
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise bad_request('the body is {"release": NUMBER}', "release")
        if self._swap is not None:
            raise ApiError(409, "another swap is under way; try again once it has ended", code="swapping")
        self._swap = asyncio.ensure_future(self._to(number, self._open))
        self._swap.add_done_callback(self._ended)
        return JSONResponse(await asyncio.shield(self._swap))  # a client that leaves does not end the swap

    async def _to(self, number: int, open_release: Callable[[int, Service], Awaitable[Opened]]) -> dict[str, Any]:
        before = self._services.current
        started = time.monotonic()
        opened = await open_release(number, before)
        loaded = time.monotonic()
        finishing = self._services.users(before)
        await self._services.replace(opened.service)
        close, self._close = self._close, opened.close
        await close()
        return {
            "release": number,
            "before": before.release,
            "finished": finishing,
            "load_seconds": loaded - started,
            "drain_seconds": time.monotonic() - loaded,
        }

    def _ended(self, swap: asyncio.Task[dict[str, Any]]) -> None:
        self._swap = None
        if not swap.cancelled():
            swap.exception()  # read, also where the client has left
