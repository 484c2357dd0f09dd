"""HTTP server in a background thread or in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hone.agents.serving.errors import ApiError
from hone.errors import ConfigError, ProcessError

HEADER_SECONDS = 20.0
"""Time limit for the headers of a request, from the connection or from their first byte."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol with a time limit for headers: a client that sends a byte now and then would keep its connection for ever.

    The limit holds while no request is running and part of one has arrived, or nothing since the connection.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        """Pass on data; the limit ends once they complete the headers, and begins with headers that are not complete."""
        super().data_received(data)
        if self._is_answering():
            self._end_deadline()
        elif self._deadline is None:
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # type: ignore[attr-defined]
        return cycle is not None and not cycle.response_complete

    def _start_deadline(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(HEADER_SECONDS, self._close)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()  # type: ignore[attr-defined]


class RequestCheck:
    """Application that answers only requests of programs, and of web pages of this host.

    - A web page can have its own domain point to 127.0.0.1, and then send requests to this machine as if to its server (DNS
      rebinding). The header ``Host`` has the page's domain then.
    - A page of any site can send requests that change something, as a form or as plain text, without asking. Browsers name the
      page's site in ``Origin``; and they ask before they send JSON, or a key in a header, to another site.

    Names of this host in ``hosts`` have no ports; empty allows all.
    """

    def __init__(self, app: Application, hosts: tuple[str, ...] = ()) -> None:
        self._app, self._hosts = app, frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        body = json.dumps(refusal.body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope) -> ApiError | None:
        values: dict[bytes, list[str]] = {}
        for name, value in scope.get("headers", ()):
            values.setdefault(name, []).append(value.decode("latin-1"))
        named = values.get(b"host", [])
        wrong = [host for host in named if self._hosts and host_name(host) not in self._hosts]
        if wrong:
            shown = ", ".join(sorted(self._hosts))
            return ApiError(403, f"'{wrong[0][:80]}' is not this host; use {shown}", code="host_not_allowed")
        if scope.get("type") != "http" or scope.get("method") in _READING:
            return None
        for origin in values.get(b"origin", []):
            if named != [origin.partition("://")[2]]:
                return ApiError(403, f"pages of '{origin[:80]}' may not send this", code="origin_not_allowed")
        if _KEYS & values.keys():
            return None  # browsers ask before they send such a header to another site
        has_body = b"transfer-encoding" in values or values.get(b"content-length", ["0"]) != ["0"]
        kind = ",".join(values.get(b"content-type", [])).partition(";")[0].strip().lower()
        if has_body and kind != "application/json":
            what = f"the content type is '{kind[:80]}', not application/json"
            return ApiError(
                415, f"{what}; send the header Content-Type: application/json", code="content_type_not_allowed"
            )
        return None


_READING = ("GET", "HEAD", "OPTIONS")
_KEYS = {b"authorization", b"x-api-key"}


def host_name(header: str) -> str:
    """Return the host of a header ``Host``, in lower case and without its port.

    >>> host_name("LocalHost:8000"), host_name("[::1]:8000"), host_name("127.0.0.1")
    ('localhost', '[::1]', '127.0.0.1')
    """
    host = header.strip().lower()
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]


BACKLOG = 4096
START_SECONDS = 30.0
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is reachable only from this machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def check_access(host: str, token: str | None) -> None:
    """Check that a host reachable from other machines has a token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"host '{host}' is reachable from other machines, which requires a token",
            why="everyone who can reach the port could use the model and read the recorded conversations",
            fix="set HONE_SERVE_TOKEN (or --token), or use --host 127.0.0.1",
        )


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol is named because asyncio sends small packets at once (TCP_NODELAY) only if it is
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"{host}:{port} cannot be served: {error.strerror or error}",
            fix="use a free port with --port (0 takes any) and an address of this machine with --host",
        ) from error
    return sock


def allow_many_connections() -> int:
    """Raise this process's limit of open files to the hard limit; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems report a hard limit that they do not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class HttpServer:
    """Server of an ASGI application; port 0 takes a free one.

    On loopback, requests have to name ``host`` or one of :data:`LOOPBACK_NAMES` as their host.
    """

    def __init__(self, app: Any, *, host: str = "127.0.0.1", port: int = 0) -> None:
        allow_many_connections()
        self._socket = listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{shown}:{self.port}"  # ``http://host:port``
        config = uvicorn.Config(
            RequestCheck(app, (*LOOPBACK_NAMES, shown) if is_loopback(host) else ()),
            http=TimedProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        """Start serving in a thread; return once it accepts connections.

        Raises:
            ProcessError: it does not start within ``START_SECONDS``.
        """
        self._thread = threading.Thread(target=self.run, name="hone-serve", daemon=True)
        self._thread.start()
        ready = threading.Event()
        for _ in range(int(START_SECONDS / 0.01)):
            if self._server.started or not self._thread.is_alive():
                break
            ready.wait(0.01)
        if not self._server.started:
            raise ProcessError(f"the endpoint at {self.url} did not start within {START_SECONDS:g} s")

    def stop(self) -> None:
        """Stop the server; running calls have five seconds."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(15)
        self._socket.close()
