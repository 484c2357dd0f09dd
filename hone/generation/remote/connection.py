"""Client side of a connection to an engine's server."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hone.errors import ConfigError, ProcessError
from hone.generation.remote import messages
from hone.generation.remote.messages import PROTOCOL, Message

HELLO_SECONDS = 20.0
"""Time limit of the server's hello message."""


class EngineLost(ProcessError):
    """Raised when an engine's process died or its connection broke; its pending requests are lost."""

    code = "E-engine-lost"


class Connection:
    """Requests to a server and their answers. A thread reads the answers, so the connection needs no event loop.

    ``explain`` returns the reason of a lost connection.

    Raises:
        ConfigError: no server listens there, it is not an engine of Hone, has another protocol, or refuses the token.
    """

    def __init__(self, host: str, port: int, token: str, explain: Callable[[], str] | None = None) -> None:
        self._explain = explain or (lambda: f"the connection to the engine at {host}:{port} broke")
        self._pending: dict[int, Future[Any]] = {}
        self._ids, self._lock, self._sending = itertools.count(1), threading.Lock(), threading.Lock()
        self.lost: str | None = None  # why the connection ended, or None
        try:
            self._socket = socket.create_connection((host, port), timeout=HELLO_SECONDS)
        except OSError as error:
            raise _no_engine(host, port, f"no server answers ({error})") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.hello = self._greet(host, port, token)  # first message of the server
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._read, name="engine answers", daemon=True)
        self._thread.start()

    def ask(self, do: str, **fields: Any) -> Future[Any]:
        """Send a request; the future gets the answer, or the server's error.

        Raises:
            EngineLost: the connection is broken.
        """
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._ids)
            if self.lost is None:
                self._pending[number] = future
        if self.lost is not None:
            raise EngineLost(self.lost)
        frame = messages.pack({"id": number, "do": do, **fields})
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError:
            self._lose()
        return future

    def close(self) -> None:
        with self._lock:
            self.lost = self.lost or "the connection to the engine was closed"
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=5)

    def _greet(self, host: str, port: int, token: str) -> Message:
        try:
            self._socket.sendall(messages.pack({"hello": "hone", "protocol": PROTOCOL, "token": token}))
            hello = messages.receive(self._socket)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise _no_engine(host, port, f"the server is not an engine of Hone ({error})") from error
        if hello is None or "error" in hello or hello.get("protocol") != PROTOCOL:
            self._socket.close()
            if hello is None:
                raise _no_engine(host, port, "the server closed the connection")
            raise _no_engine(
                host, port, hello.get("error") or f"the server has protocol {hello.get('protocol')}, not {PROTOCOL}"
            )
        return hello

    def _read(self) -> None:
        while True:
            try:
                message = messages.receive(self._socket)
            except ValueError:
                message = None
            if message is None:
                break
            with self._lock:
                future = self._pending.pop(message.get("id", 0), None)
            if future is None:
                continue
            if "error" in message:
                future.set_exception(messages.error_of(message["error"]))
            else:
                future.set_result(message.get("result"))
        self._lose()

    def _lose(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
            if self.lost is None:
                self.lost = self._explain()
        for future in pending.values():
            future.set_exception(EngineLost(self.lost))


def _no_engine(host: str, port: int, problem: str) -> ConfigError:
    return ConfigError(
        f"cannot use an engine at {host}:{port}: {problem}",
        why="rollout.engine_url attaches to a server that `hone engines serve` started",
        fix="hone engines serve vllm --model DIR --port PORT, then rollout.engine_url=tcp://HOST:PORT and the same HONE_ENGINE_TOKEN",
        where="actor_rollout_ref.rollout.engine_url",
    )
