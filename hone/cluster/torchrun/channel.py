"""Connections between rank 0 and the other ranks: calls in one direction, answers in the other.

The processes find each other by the store of the launcher. Objects are pickled; both ends belong to one run, which a random
key in the store proves.
"""

from __future__ import annotations

import itertools
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any, Protocol

from torch.distributed.rendezvous import rendezvous

from hone.cluster.torchrun.ranks import LaunchedRank
from hone.errors import ProcessError

CONNECT_SECONDS = 300.0
"""Seconds that rank 0 has to answer."""
RETRY_SECONDS = 0.2
_PLACE = "hone/control"
"""Key of the store with the address of rank 0 and the key of the connections."""


class Link(Protocol):
    """Connection with another process."""

    def send_bytes(self, buf: bytes, /) -> None: ...
    def recv_bytes(self) -> bytes: ...
    def close(self) -> None: ...


def answering_end(launched: LaunchedRank) -> Link:
    """Connect this rank with rank 0.

    Raises:
        ProcessError: rank 0 does not answer.
    """
    store, _, _ = next(rendezvous("env://"))
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        host, port, key = store.get(_PLACE).decode().split()
        try:
            connection = Client((host, int(port)), authkey=bytes.fromhex(key))
        except (OSError, EOFError, AuthenticationError) as error:  # the address of a rank 0 before a restart
            if time.monotonic() > deadline:
                raise ProcessError(
                    f"rank {launched.rank} cannot connect to rank 0 at {host}:{port}: {error}",
                    why="rank 0 sends the work to the others over this connection",
                    fix="open the ports between the nodes, and see the messages of rank 0",
                ) from error
            time.sleep(RETRY_SECONDS)
            continue
        send(connection, launched.rank)
        return connection


def send(connection: Link, message: Any) -> None:
    """Send an object. Plain pickling, because that of the connection passes tensors by shared memory of one machine."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Link) -> Any:
    """Wait for the next object.

    Raises:
        EOFError: the other end is gone.
    """
    try:
        return pickle.loads(connection.recv_bytes())
    except ConnectionError as error:
        raise EOFError from error


class AskingEnd:
    """Rank 0's connections to all other ranks.

    Args:
        launched: this process, rank 0.
        lost: returns the error for a rank that is gone.
    """

    def __init__(self, launched: LaunchedRank, lost: Callable[[int], BaseException]) -> None:
        self._store, _, _ = next(rendezvous("env://"))  # it may be this process that serves the store
        self._lost = lost
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, dict[int, Future[Any]]] = {}
        self._connections: dict[int, Link] = {}
        key = secrets.token_bytes(32)
        with Listener(("", 0), backlog=launched.world, authkey=key) as listener:
            self._store.set(_PLACE, f"{launched.address} {listener.address[1]} {key.hex()}")
            while len(self._connections) < launched.world - 1:
                connection = listener.accept()
                self._connections[receive(connection)] = connection
        for rank, connection in self._connections.items():
            self._waiting[rank] = {}
            threading.Thread(target=self._read, args=(rank, connection), daemon=True, name=f"rank {rank}").start()

    @property
    def ranks(self) -> Sequence[int]:
        """The other ranks."""
        return sorted(self._connections)

    def ask(self, rank: int, *message: Any) -> Future[Any]:
        """Send a call to a rank; return its answer to come."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[rank][number] = answer
            try:
                send(self._connections[rank], (number, *message))
            except OSError:
                answer.set_exception(self._lost(rank))
                self._waiting[rank].pop(number, None)
        return answer

    def tell(self, rank: int, message: Any) -> None:
        """Send an object that has no answer."""
        send(self._connections[rank], message)

    def close(self) -> None:
        """End the connections; the other ranks then end."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _read(self, rank: int, connection: Link) -> None:
        while True:
            try:
                number, failed, value = receive(connection)
            except (EOFError, OSError):
                break
            answer = self._waiting[rank].pop(number)
            if failed:
                answer.set_exception(value)
            else:
                answer.set_result(value)
        with self._lock:
            left, self._waiting[rank] = list(self._waiting[rank].values()), {}
        for answer in left:
            answer.set_exception(self._lost(rank))
