"""HTTP server of the viewer: the page, and its data as JSON.

Access needs the token: the first address has it, the answer sets a cookie and forgets the address. Without ``--host`` the server listens
on loopback and answers to this machine's names only. The page may load nothing from elsewhere (`Content-Security-Policy`).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from hone.apps.lab.viewer.api import READS, WRITES, Workspace
from hone.apps.lab.viewer.episodes import Picture
from hone.apps.lab.viewer.selections import Download
from hone.errors import HoneError

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
WRITE_HEADER = "x-hone-view"
"""Header that a page of another origin cannot send without permission; every POST needs it."""
_MAX_BODY = 16 * 2**20


class SafeHeaders:
    """Middleware that adds :data:`HEADERS` to every answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


class Viewer:
    """The viewer as an ASGI application (:attr:`app`)."""

    def __init__(self, workspace: Workspace, token: str) -> None:
        self._workspace, self._token = workspace, token
        self._files = {"/" + str(file.relative_to(PAGE)): file for file in PAGE.rglob("*") if file.suffix in TYPES}
        self.app = Starlette(
            routes=[
                Route("/", self.page, methods=["GET"]),
                *(Route(f"/api/{name}", self._reader(read), methods=["GET"]) for name, read in READS.items()),
                *(Route(f"/api/{name}", self._writer(write), methods=["POST"]) for name, write in WRITES.items()),
                Route("/{path:path}", self.file, methods=["GET"]),
            ],
            middleware=[Middleware(SafeHeaders)],
            exception_handlers={HoneError: _hone_error},
        )

    def page(self, request: Request) -> Response:
        """Return the page; with ``?token=`` set the cookie and go to the page."""
        given = request.query_params.get("token")
        if given is not None:
            if not self._is_token(given):
                return _refusal()
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(self._cookie(request), self._token, httponly=True, samesite="strict", path="/")
            return response
        if not self._allowed(request):
            return _refusal()
        return _file_response(PAGE / "index.html")

    def file(self, request: Request) -> Response:
        file = self._files.get(request.url.path)
        if not self._allowed(request):
            return _refusal()
        return PlainTextResponse("not found", status_code=404) if file is None else _file_response(file)

    def _reader(self, read: Callable[[Workspace, Mapping[str, str]], Any]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            if not self._allowed(request):
                return _refusal()
            result = read(self._workspace, request.query_params)
            if isinstance(result, Download):
                headers = {"Content-Disposition": f'attachment; filename="{result.name}"'}
                return Response(result.text, media_type="application/jsonl", headers=headers)
            if isinstance(result, Picture):
                return Response(result.content, media_type=result.media_type)
            return JSONResponse(result)

        return answer

    def _writer(self, write: Callable[[Workspace, Any], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            if not self._allowed(request) or WRITE_HEADER not in request.headers:
                return _refusal()
            length = request.headers.get("content-length", "")
            if not length.isdecimal() or int(length) > _MAX_BODY:
                return PlainTextResponse("too large", status_code=413)
            try:
                body = await request.json()
                if not isinstance(body, dict):
                    raise TypeError("it is not an object")
                return JSONResponse(await run_in_threadpool(write, self._workspace, body))
            except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
                raise HoneError(f"the request cannot be read: {error!r:.200}", code="E-view-request") from None

        return answer

    def _cookie(self, request: Request) -> str:
        """Name of the cookie; browsers send a host's cookies to all its ports."""
        return f"hone_view_{request.url.port or 80}"

    def _allowed(self, request: Request) -> bool:
        return self._is_token(request.cookies.get(self._cookie(request), ""))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _file_response(file: Path) -> Response:
    return Response(file.read_bytes(), media_type=TYPES[file.suffix])


def _refusal() -> Response:
    return PlainTextResponse("Open the address that `hone view` printed: it has the token.", status_code=403)


def _hone_error(request: Request, error: Any) -> Response:
    body = {"error": {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix, "where": error.where}}
    return JSONResponse(body, status_code=404 if error.code == "E-view-address" else 400)
