"""Results that clients ask for: each request gets a name at once, and its result, or its error, under that name later.

Operations of one model are computed in the order of their numbers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from hone.errors import HoneError

KEPT_SECONDS, KEPT_BYTES = 3600.0, 256 * 2**20
"""How long a result is kept, and how many bytes of results: beyond them, those that were fetched go first, then the oldest."""
_OVERHEAD = 2**11
"""Bytes of a result besides its protobuf."""
log = logging.getLogger("hone.serve")


@dataclass(frozen=True)
class Result:
    """A result of a request: JSON, or a message of the protocol's protobuf."""

    json: dict[str, Any] | None = None
    protobuf: bytes | None = None


@dataclass(frozen=True)
class Failure:
    """The error of a request; ``user`` if the request was wrong."""

    message: str
    user: bool


@dataclass
class TrainedModel:
    """An adapter in training."""

    adapter: str
    rank: int  # of the adapter
    used: float  # when it, or its session, was last heard of
    following: int = 1  # number of the next operation
    # events of operations that came before their turn, by number
    arrived: dict[int, asyncio.Event] = field(default_factory=dict)
    # numbers of requests that were refused; the client may repeat one, or send the next
    refused: set[int] = field(default_factory=set)

    def pass_refused(self) -> None:
        """Give the turn to the next operation that was not refused."""
        while self.following in self.refused:
            self.refused.discard(self.following)
            self.following += 1
        if event := self.arrived.pop(self.following, None):
            event.set()


class Futures:
    """Futures by name, on the event loop that computes them."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Result | Failure]] = {}
        self._ended: dict[str, float] = {}
        self._fetched: dict[str, None] = {}
        self._bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def start(self, name: str, work: Coroutine[Any, Any, Result]) -> None:
        """Begin a request, unless one of that name has begun: a client repeats a request whose answer it did not get."""
        self._forget_old()
        if name in self._tasks:
            work.close()
            return
        task = self._tasks[name] = asyncio.get_running_loop().create_task(_outcome(work))
        task.add_done_callback(lambda task: self._end(name, task))

    def _end(self, name: str, task: asyncio.Task[Result | Failure]) -> None:
        self._ended[name] = time.monotonic()
        self._bytes += _size(task)
        while self._bytes > KEPT_BYTES and len(self._ended) > 1:
            self._forget(next(iter(self._fetched), next(iter(self._ended))))

    def _forget(self, name: str) -> None:
        self._bytes -= _size(self._tasks.pop(name))
        self._fetched.pop(name, None)
        del self._ended[name]

    async def wait(self, name: str, seconds: float) -> Result | Failure | None:
        """Return the outcome of a request, or None if it is not there within ``seconds``.

        Raises:
            KeyError: there is no request of that name, or its outcome is no longer kept.
        """
        task = self._tasks[name]
        done, _ = await asyncio.wait([task], timeout=seconds)
        if name in self._ended:
            self._fetched[name] = None
        return task.result() if done else None

    def cancel(self, name: str) -> None:
        """End a request, if it is under way."""
        if name in self._tasks:
            self._tasks[name].cancel()

    def _forget_old(self) -> None:
        limit = time.monotonic() - KEPT_SECONDS
        while self._ended and self._ended[oldest := next(iter(self._ended))] < limit:
            self._forget(oldest)


def _size(task: asyncio.Task[Result | Failure]) -> int:
    outcome = None if task.cancelled() else task.result()
    return _OVERHEAD + len(getattr(outcome, "protobuf", None) or b"")


async def _outcome(work: Coroutine[Any, Any, Result]) -> Result | Failure:
    try:
        return await work
    except asyncio.CancelledError:
        return Failure("cancelled", user=True)
    except HoneError as error:
        return Failure(str(error), user=True)
    except Exception as error:
        log.exception("a request failed")
        return Failure(f"{type(error).__name__}: {error}", user=False)
