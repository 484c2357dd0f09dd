"""What an engine's server and its client say to each other: frames of JSON over a socket.

    client                                          server
      hello {protocol, token}            ->
                                         <-   hello {protocol, description}
      {id, do: "generate", request}      ->
      {id, do: "abort", requests}        ->
                                         <-   {id, result}   or   {id, error: {code, what, why, fix}}

A frame is its length (4 bytes, big-endian) and so many bytes of UTF-8. Every question has an id and one answer; answers come in
the order in which they are ready. JSON keeps every float as it is. Nothing is unpickled, on either side.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

from hone.data.types import StopReason
from hone.errors import ConfigError, GenerationError, HoneError
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams

PROTOCOL = 2
"""Version of what is said; both sides must have the same."""
LONGEST = 2**31 - 1
"""Most bytes of a frame; weights that go inside frames are cut smaller."""
_LENGTH = struct.Struct(">I")
_KINDS: dict[str, type[HoneError]] = {kind.code: kind for kind in (ConfigError, GenerationError)}

Message = dict[str, Any]


def pack(message: Message) -> bytes:
    """The frame of a message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader, *, longest: int = LONGEST) -> Message | None:
    """The next message; None at the end of the stream.

    Raises:
        ValueError: what came is no message.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > longest:
            raise ValueError(f"a frame of {length} bytes, at most {longest} are taken")
        return _decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive(connection: socket.socket) -> Message | None:
    """As :func:`read`, of a blocking socket."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > LONGEST:
        raise ValueError(f"a frame of {length} bytes, at most {LONGEST} are taken")
    body = _exactly(connection, length)
    return None if body is None else _decode(body)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 2**20))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def _decode(body: bytes) -> Message:
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"a frame that holds {type(message).__name__} and no object")
    return message


def request_as_message(request: GenerationRequest) -> Message:
    """A request, for the wire; who watches its progress stays behind."""
    return {**vars(request), "sampling": vars(request.sampling), "progress": None}


def request_of(message: Message) -> GenerationRequest:
    """The request in a message."""
    sampling = dict(message["sampling"])
    for name in ("stop_token_ids", "stop"):
        sampling[name] = tuple(sampling[name])
    return GenerationRequest(**{**message, "sampling": SamplingParams(**sampling)})


def completion_as_message(completion: Completion) -> Message:
    """A completion, for the wire."""
    return {**vars(completion), "stop_reason": completion.stop_reason.value}


def completion_of(message: Message) -> Completion:
    """The completion in a message."""
    first, last = message["weight_versions"]
    reason = StopReason(message["stop_reason"])
    return Completion(**{**message, "stop_reason": reason, "weight_versions": (first, last)})


def error_as_message(error: BaseException) -> Message:
    """An error, for the wire; what is no error of Hone's own is shown by name."""
    if isinstance(error, HoneError):
        return {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix, "where": error.where}
    return {"code": GenerationError.code, "what": f"the engine raised {type(error).__name__}: {error}"}


def error_of(message: Message) -> HoneError:
    """The error in a message."""
    kind = _KINDS.get(message.get("code", ""), GenerationError)
    return kind(
        message.get("what", "the engine gave an error without words"),
        why=message.get("why", ""),
        fix=message.get("fix", ""),
        where=message.get("where", ""),
    )
