"""A small HTTP server in a thread: judges, remote rewards and sandboxes for tests, with real sockets; and ports for other servers."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]


@contextlib.contextmanager
def serve(answer: Callable[[str, Any], Answer]) -> Iterator[tuple[str, list[tuple[str, Any, dict[str, str]]]]]:
    """Serve POSTs of JSON on a free port of this machine.

    Args:
        answer: from path and body to status and body; a text is sent as it is.

    Yields:
        The address, and a list that each request (path, body, headers) is added to.
    """
    seen: list[tuple[str, Any, dict[str, str]]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((self.path, body, {name.lower(): value for name, value in self.headers.items()}))
            status, said = answer(self.path, body)
            data = (said if isinstance(said, str) else json.dumps(said)).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def free_port() -> int:
    """A port for a server to be started; outside those that the system and Ray's workers take, so that it stays free until then."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """A port that is taken, and where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]
