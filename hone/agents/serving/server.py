"""HTTP server in a background thread or in the foreground."""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import socket
import threading
from typing import Any

import uvicorn

from hone.agents.serving.connections import RequestCheck, TimedProtocol
from hone.errors import ConfigError, ProcessError

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
