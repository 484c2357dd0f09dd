"""Messages between an engine's server and its client: JSON frames over a socket; and the client's side of a connection.

    client                                          server
      hello {protocol, token}            ->
                                         <-   hello {protocol, description}
      {id, do: "generate", request}      ->
      {id, do: "abort", requests}        ->
                                         <-   {id, result}   or   {id, error: {code, what, why, fix}}

A frame is its length (4 bytes, big-endian) and that many bytes of UTF-8. Every request has an id and one answer; answers are
sent in the order in which they are ready. JSON keeps floats exact. Neither side unpickles anything.

The content of each image is sent once; later requests name it, by the SHA-256 of the content, so that clients share images:

    client  {images: [{name, content}]}     an image that the server was not sent yet
    client  {images: [{name}]}              one that it was
    server  {missing: true}                 it has dropped one of them: the client sends the request again with all contents
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from hone.data.images import ImageData
from hone.data.types import StopReason
from hone.errors import ConfigError, GenerationError, HoneError, ProcessError, RequestError
from hone.generation.protocol import Completion, Constraint, ConstraintKind, GenerationRequest, SamplingParams

KEPT_BYTES = 512 * 2**20
"""Bytes of images that a server keeps; the oldest are dropped."""
MISSING = {"missing": True}
"""Answer of a server that lacks an image."""

Entries = list[dict[str, Any]]


class SentImages:
    """Client's side: what a server was sent."""

    def __init__(self) -> None:
        self._sent: set[str] = set()

    def entries(self, images: Sequence[ImageData], *, again: bool = False) -> Entries:
        """Return the entries of a request, with contents where the server has not been sent them, or with all (``again``)."""
        entries: Entries = []
        for image in images:
            name = name_of(image)
            entries.append({"name": name})
            if again or name not in self._sent:
                entries[-1]["content"] = base64.b64encode(image.content).decode()
            self._sent.add(name)
        return entries


class ReceivedImages:
    """Server's side: the images that its clients sent last."""

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._most, self._bytes = most, 0
        self._kept: OrderedDict[str, ImageData] = OrderedDict()

    def take(self, entries: Entries) -> tuple[ImageData, ...] | None:
        """Return the images of a request; None if one is not here.

        Raises:
            ValueError: a content does not belong to its name.
        """
        images = [self._image(entry) for entry in entries]
        while self._bytes > self._most and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1].content)
        return None if any(image is None for image in images) else tuple(image for image in images if image is not None)

    def _image(self, entry: dict[str, Any]) -> ImageData | None:
        name = entry["name"]
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        if entry.get("content") is None:
            return None
        image = ImageData(base64.b64decode(entry["content"]))
        if name_of(image) != name:
            raise ValueError(f"the content of image {name} is another one")
        self._kept[name] = image
        self._bytes += len(image.content)
        return image


def name_of(image: ImageData) -> str:
    return hashlib.sha256(image.content).hexdigest()


PROTOCOL = 8
"""Version of the messages; both sides must have the same."""
LONGEST = 2**31 - 1
"""Maximum of bytes in a frame; weights inside frames are sent in smaller chunks."""
_LENGTH = struct.Struct(">I")
_KINDS: dict[str, type[HoneError]] = {kind.code: kind for kind in (ConfigError, GenerationError, RequestError)}

Message = dict[str, Any]


def pack(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader, *, longest: int = LONGEST) -> Message | None:
    """Return the next message; None at the end of the stream.

    Raises:
        ValueError: the frame is not a message.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > longest:
            raise ValueError(f"a frame of {length} bytes, the limit is {longest}")
        return _decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive(connection: socket.socket) -> Message | None:
    """Return the next message of a blocking socket; see :func:`read`."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > LONGEST:
        raise ValueError(f"a frame of {length} bytes, the limit is {LONGEST}")
    body = _exactly(connection, length)
    return None if body is None else _decode(body)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        try:
            chunk = connection.recv(min(count - len(received), 2**20))
        except OSError:
            return None
        if not chunk:
            return None
        received += chunk
    return bytes(received)


def _decode(body: bytes) -> Message:
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"a frame with {type(message).__name__}, not an object")
    return message


def request_as_message(request: GenerationRequest, images: Sequence[Mapping[str, Any]] = ()) -> Message:
    """Return a request as a message, without its progress callback."""
    constraint = request.sampling.constraint
    sampling = {**vars(request.sampling), "constraint": vars(constraint) if constraint else None}
    return {**vars(request), "sampling": sampling, "progress": None, "images": list(images)}


def request_of(message: Message, images: tuple[ImageData, ...] = ()) -> GenerationRequest:
    """Return the request in a message, with these images."""
    sampling = dict(message["sampling"])
    for name in ("stop_token_ids", "stop"):
        sampling[name] = tuple(sampling[name])
    sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling["logit_bias"])
    if (constraint := sampling["constraint"]) is not None:
        sampling["constraint"] = Constraint(ConstraintKind(constraint["kind"]), constraint["text"])
    return GenerationRequest(**{**message, "sampling": SamplingParams(**sampling), "images": images})


def completion_as_message(completion: Completion) -> Message:
    experts = base64.b64encode(np.asarray(completion.expert_ids, dtype="<i2").tobytes()).decode()
    return {**vars(completion), "stop_reason": completion.stop_reason.value, "expert_ids": experts}


def completion_of(message: Message) -> Completion:
    first, last = message["weight_versions"]
    reason = StopReason(message["stop_reason"])
    alternatives = [[(token, log_prob) for token, log_prob in position] for position in message["alternatives"]]
    experts = np.frombuffer(base64.b64decode(message["expert_ids"]), dtype="<i2")
    return Completion(
        **{
            **message,
            "stop_reason": reason,
            "weight_versions": (first, last),
            "alternatives": alternatives,
            "expert_ids": experts,
        }
    )


def error_as_message(error: BaseException) -> Message:
    """Return an error as a message; an error that is not a HoneError is described by its type."""
    if isinstance(error, HoneError):
        return {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix, "where": error.where}
    return {"code": GenerationError.code, "what": f"the engine raised {type(error).__name__}: {error}"}


def error_of(message: Message) -> HoneError:
    kind = _KINDS.get(message.get("code", ""), GenerationError)
    return kind(
        message.get("what", "the engine sent an error without a description"),
        why=message.get("why", ""),
        fix=message.get("fix", ""),
        where=message.get("where", ""),
    )


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
        frame = pack({"id": number, "do": do, **fields})
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
            self._socket.sendall(pack({"hello": "hone", "protocol": PROTOCOL, "token": token}))
            hello = receive(self._socket)
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
                message = receive(self._socket)
            except ValueError:
                message = None
            if message is None:
                break
            with self._lock:
                future = self._pending.pop(message.get("id", 0), None)
            if future is None:
                continue
            if "error" in message:
                future.set_exception(error_of(message["error"]))
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
