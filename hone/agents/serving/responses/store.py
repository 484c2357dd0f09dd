"""Earlier responses in memory, so that a request can continue one."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hone.agents.messages import Message
from hone.agents.serving.errors import ApiError

MAX_RESPONSES = 10_000
"""Maximum of stored responses; the oldest are dropped."""
MAX_BYTES = 64 * 2**20
"""Maximum of their conversations, as bytes of JSON."""


@dataclass(frozen=True)
class Stored:
    """Response with the conversation that it ends."""

    response: dict[str, Any]
    messages: tuple[Message, ...]  # its conversation without instructions
    owner: str | None  # name of the session that it belongs to; None without a session
    size: int  # bytes that it counts for


class ResponseStore:
    """Latest responses by id; used from the event loop and from the threads that read requests."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = 0

    def put(self, response: dict[str, Any], messages: Sequence[Message], owner: str | None) -> None:
        """Store a response; the oldest ones make place for it."""
        size = len(json.dumps([response, *messages]))
        with self._lock:
            self._stored[response["id"]] = Stored(response, tuple(messages), owner, size)
            self._bytes += size
            while len(self._stored) > MAX_RESPONSES or self._bytes > MAX_BYTES:
                self._bytes -= self._stored.popitem(last=False)[1].size

    def get(self, name: str, owner: str | None, param: str | None = None) -> Stored:
        """Return a response of this owner; the error for another one names the field ``param``."""
        with self._lock:
            stored = self._stored.get(name)
        if stored is None or stored.owner != owner:
            raise _missing(name, param)
        return stored

    def delete(self, name: str, owner: str | None) -> None:
        stored = self.get(name, owner)
        with self._lock:
            if self._stored.pop(name, None) is not None:
                self._bytes -= stored.size


def _missing(name: str, param: str | None) -> ApiError:
    return ApiError(
        404,
        f"response '{name[:80]}' is not stored; the server keeps the latest {MAX_RESPONSES} in memory that were sent with "
        "store=true, and a restart forgets them; send the whole conversation as input",
        code="response_not_found",
        param=param,
    )
