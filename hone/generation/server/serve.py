"""Answers clients: one connection each, any number of questions at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from hone.errors import GenerationError
from hone.generation.remote import messages
from hone.generation.remote.delta import REFUSED
from hone.generation.remote.messages import PROTOCOL, Message
from hone.generation.server.backend import Backend, Settings
from hone.generation.server.mirror import Mirror

_HELLO_BYTES = 4096
_HELLO_SECONDS = 10.0


class EngineServer:
    """An engine behind a socket.

    Args:
        backend: the engine.
        settings: that it was started with.
        token: that clients must show.
    """

    def __init__(self, backend: Backend, settings: Settings, token: str) -> None:
        self._backend, self._settings, self._token = backend, settings, token
        self._version = 0
        self._incomplete: int | None = None
        self._loading, self._broken = asyncio.Lock(), False
        self._mirror = Mirror()
        self._paused = asyncio.Event()
        self._keys = 0
        self._do: dict[str, Callable[[Message, dict[str, str]], Awaitable[Any]]] = {
            "generate": self._generate,
            "abort": self._abort,
            "pause": self._pause,
            "resume": self._resume,
            "load": self._load,
            "sleep": self._sleep,
            "wake": self._wake,
            "describe": self._describe,
        }

    def description(self) -> Message:
        """What clients are told at the beginning."""
        settings, backend = self._settings, self._backend
        return {
            "engine": settings.engine,
            "dtype": settings.dtype,
            "device": backend.device,
            "max_model_len": settings.max_model_len,
            "max_cache_tokens": backend.max_cache_tokens,
            "version": self._version,
            "incomplete": self._incomplete,
            "stats": backend.stats(),
        }

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it hangs up; what it still waits for is ended then."""
        tasks: set[asyncio.Task[None]] = set()
        names: dict[str, str] = {}
        try:
            if not await self._welcome(reader, writer):
                return
            while (message := await messages.read(reader)) is not None:
                task = asyncio.create_task(self._answer(message, writer, names))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except ValueError:
            pass  # what came is no message: hang up
        finally:
            await self._backend.abort(list(names.values()))
            for task in tasks:
                task.cancel()
            writer.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            hello = await asyncio.wait_for(messages.read(reader, longest=_HELLO_BYTES), _HELLO_SECONDS)
        except TimeoutError:
            return False
        if hello is None:
            return False
        shown = str(hello.get("token", "")).encode()
        answer: Message
        if not hmac.compare_digest(shown, self._token.encode()):
            answer = {"error": "it refuses the token"}
        elif hello.get("protocol") != PROTOCOL:
            answer = {"error": f"it speaks protocol {PROTOCOL}, not {hello.get('protocol')}"}
        else:
            peer = ipaddress.ip_address(writer.get_extra_info("peername")[0])
            answer = {"protocol": PROTOCOL, "description": {**self.description(), "local": peer.is_loopback}}
        writer.write(messages.pack(answer))
        await writer.drain()
        return "error" not in answer

    async def _answer(self, message: Message, writer: asyncio.StreamWriter, names: dict[str, str]) -> None:
        number = message.get("id")
        try:
            do = self._do.get(message.get("do", ""))
            if do is None:
                raise GenerationError(f"the engine's server cannot do '{message.get('do')}'")
            answer = {"id": number, "result": await do(message, names)}
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - every error is the client's answer
            answer = {"id": number, "error": messages.error_as_message(error)}
        with contextlib.suppress(ConnectionError):
            writer.write(messages.pack(answer))
            await writer.drain()

    # what can be asked -----------------------------------------------------------------------------------------------

    async def _generate(self, message: Message, names: dict[str, str]) -> Message:
        if self._incomplete is not None:
            raise GenerationError(f"weights of version {self._incomplete} have arrived only in part")
        asked = messages.request_of(message["request"])
        self._keys += 1
        own = str(self._keys)  # names of requests may repeat between clients
        names[asked.request_id] = own
        first = self._version
        try:
            completion = await self._backend.generate(dataclasses.replace(asked, request_id=own))
        finally:
            names.pop(asked.request_id, None)
        completion.request_id, completion.weight_versions = asked.request_id, (first, self._version)
        return messages.completion_as_message(completion)

    async def _abort(self, message: Message, names: dict[str, str]) -> None:
        await self._backend.abort([names[name] for name in message["requests"] if name in names])

    async def _pause(self, message: Message, names: dict[str, str]) -> None:
        await self._backend.pause()

    async def _resume(self, message: Message, names: dict[str, str]) -> None:
        await self._backend.resume()

    async def _load(self, message: Message, names: dict[str, str]) -> str | None:
        """Take weights, parcel by parcel in the order in which they were sent. Between the first and the last, and after one that
        failed, nothing is served. A parcel that is refused is sent again before the last.
        """
        parcel, first, last = message["parcel"], message["first"], message["last"]
        async with self._loading:
            if parcel is None and first and last:
                self._version = message["version"]  # the weights are those it has
                return None
            if self._broken and not first:
                raise GenerationError(
                    f"weights of version {self._incomplete} did not arrive whole: send all of them again"
                )
            self._incomplete, self._broken = message["version"], True
            if first:
                await self._backend.begin_weights()
            if parcel is not None:
                whole = await self._whole(parcel, message.get("entries"))
                if whole is None:
                    self._broken = False
                    return REFUSED
                await self._backend.load_weights(whole)
            if last:
                await self._backend.finish_weights()
                self._version, self._incomplete = message["version"], None
            self._broken = False
            return None

    async def _whole(self, parcel: Message, entries: list[Message] | None) -> Message | None:
        """The parcel as the engine takes it; None when its weights are not what they are said to be."""
        if entries is None:
            self._mirror.close()  # it would be of another version
            return parcel
        return await asyncio.to_thread(self._mirror.take, parcel, entries)

    async def _sleep(self, message: Message, names: dict[str, str]) -> None:
        await self._backend.abort(list(names.values()))
        await self._backend.sleep()

    async def _wake(self, message: Message, names: dict[str, str]) -> None:
        """Engines here keep their weights while they sleep, and fill their cache again by themselves."""

    async def _describe(self, message: Message, names: dict[str, str]) -> Message:
        return self.description()


async def listen(server: EngineServer, host: str, port: int) -> tuple[asyncio.Server, int]:
    """Listen at an address; returns the port too, which port 0 leaves open.

    Raises:
        OSError: the port is in use.
    """
    listening = await asyncio.start_server(server.connected, host, port, limit=2**20, backlog=socket.SOMAXCONN)
    return listening, listening.sockets[0].getsockname()[1]
