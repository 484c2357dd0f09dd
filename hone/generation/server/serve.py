"""An engine's process: reads settings from standard input, starts the engine, reports its port and serves clients.

One connection per client, any number of requests at once. The end of standard input, or a changed parent process, means that Hone
has ended. The program then kills its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import importlib.util
import inspect
import ipaddress
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from hone.errors import ConfigError, GenerationError
from hone.generation.protocol import incomplete_weights
from hone.generation.remote import delta, messages
from hone.generation.remote.delta import REFUSED
from hone.generation.remote.messages import MISSING, PROTOCOL, Message, ReceivedImages
from hone.generation.remote.transports import Mappings, SharedBuffer, copy, open_chunk, padded, view
from hone.generation.server.backend import Backend, BackendSettings

_LEAST_BYTES = 2**20


class Mirror:
    """A copy of an engine's weights in their served dtype, so that only changes have to be sent for the next version.

    Engines store weights in other layouts: packed, fused, sharded over processes. The mirror has them as the trainer sends
    them, in memory that the engine's processes map. A delta is applied to the mirror and checked; the engine loads whole
    weights from there:

        chunk --> mirror --> checksum of each whole weight --> chunk in shared memory --> the engine's workers
                                  `-- wrong: the chunk is refused, and the engine gets nothing
    """

    def __init__(self) -> None:
        self._memory, self._mappings = SharedBuffer(), Mappings()
        self._places: dict[str, dict[str, Any]] = {}
        self._used = 0

    def apply(self, chunk: dict[str, Any], entries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Apply a chunk; return one of the whole weights for the engine, or None if a checksum is wrong.

        ``entries`` describe the resulting weights (:func:`hone.generation.remote.delta.as_entry`).
        """
        with open_chunk(chunk, self._mappings) as tensors:
            arrived = dict(tensors)
            valid = [self._apply_entry(entry, arrived) for entry in entries]
        if not all(valid):
            return None
        places = [self._places[entry["name"]] for entry in entries]
        memory = self._memory.at_least(self._used)
        return {"transport": "shared_memory", "path": self._memory.path, "bytes": memory.numel(), "places": places}

    def close(self) -> None:
        self._memory.close()
        self._places, self._used = {}, 0

    def _apply_entry(self, entry: dict[str, Any], arrived: dict[str, Tensor]) -> bool:
        name = entry["name"]
        if entry["delta"]:
            place = self._places.get(name)
            if place is None or (place["dtype"], place["shape"]) != (entry["dtype"], entry["shape"]):
                return False
            target = view(self._memory.at_least(self._used), place)
            try:
                delta.apply(arrived[f"{name} gaps"], arrived[f"{name} values"], target)
            except ValueError:
                return False
        else:
            target = self._place_for(entry, arrived[name])
            copy(arrived[name], target)
        return delta.checksum_of(target) == entry["checksum"]

    def _place_for(self, entry: dict[str, Any], tensor: Tensor) -> Tensor:
        """Return the mirror's tensor of a weight, allocated if it is new."""
        name, place = entry["name"], self._places.get(entry["name"])
        if list(tensor.shape) != entry["shape"]:
            raise GenerationError(
                f"weight '{name}' has shape {list(tensor.shape)}, but its description has {entry['shape']}"
            )
        if place is None or (place["dtype"], place["shape"]) != (entry["dtype"], entry["shape"]):
            described = {key: entry[key] for key in ("name", "dtype", "shape")}
            self._places[name] = place = {**described, "offset": self._used}
            self._used += padded(tensor.nbytes)
        memory = self._memory.at_least(_LEAST_BYTES)
        if self._used > memory.numel():
            memory = self._memory.at_least(max(self._used, 2 * memory.numel()))
        return view(memory, place)


_HELLO_BYTES = 4096
_HELLO_SECONDS = 10.0


class EngineServer:
    """Serves an engine on a socket."""

    def __init__(self, backend: Backend, settings: BackendSettings, token: str) -> None:
        self._backend, self._settings, self._token = backend, settings, token
        self._version = 0
        self._incomplete: int | None = None
        self._loading, self._broken = asyncio.Lock(), False
        self._mirror, self._images = Mirror(), ReceivedImages()
        self._paused = asyncio.Event()
        self._keys = 0
        self._do: dict[str, Callable[[Message, dict[str, str]], Awaitable[Any]]] = {
            "generate": self._generate,
            "abort": self._abort,
            "pause": lambda *_: backend.pause(),
            "resume": lambda *_: backend.resume(),
            "load": self._load,
            "sleep": self._sleep,
            "wake": lambda message, _: backend.wake(cache=message["cache"]),
            "describe": self._describe,
        }

    def description(self) -> Message:
        settings, backend = self._settings, self._backend
        return {
            "engine": settings.engine,
            "dtype": settings.dtype,
            "device": backend.device,
            "gpus": backend.gpus,
            "max_model_len": settings.max_model_len,
            "max_cache_tokens": backend.max_cache_tokens,
            "reads_images": backend.reads_images,
            "version": self._version,
            "incomplete": self._incomplete,
            "stats": backend.stats(),
        }

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it disconnects; its pending requests are aborted then."""
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
            pass  # not a message: close the connection
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
        token = str(hello.get("token", "")).encode()
        answer: Message
        if not hmac.compare_digest(token, self._token.encode()):
            answer = {"error": "the server refuses the token"}
        elif hello.get("protocol") != PROTOCOL:
            answer = {"error": f"the server has protocol {PROTOCOL}, not {hello.get('protocol')}"}
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
                raise GenerationError(f"the engine's server has no request '{message.get('do')}'")
            answer = {"id": number, "result": await do(message, names)}
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - every error is the client's answer
            answer = {"id": number, "error": messages.error_as_message(error)}
        with contextlib.suppress(ConnectionError):
            writer.write(messages.pack(answer))
            await writer.drain()

    # requests --------------------------------------------------------------------------------------------------------

    async def _generate(self, message: Message, names: dict[str, str]) -> Message:
        if self._incomplete is not None:
            raise incomplete_weights(f"of version {self._incomplete}")
        images = self._images.take(message["request"]["images"])
        if images is None:
            return MISSING
        request = messages.request_of(message["request"], images)
        self._keys += 1
        key = str(self._keys)  # request ids may repeat between clients
        names[request.request_id] = key
        first, arrived = self._version, time.perf_counter()
        try:
            completion = await self._backend.generate(dataclasses.replace(request, request_id=key))
        finally:
            names.pop(request.request_id, None)
        completion.request_id, completion.weight_versions = request.request_id, (first, self._version)
        completion.queued_seconds = max(0.0, time.perf_counter() - arrived - completion.seconds)
        return messages.completion_as_message(completion)

    async def _abort(self, message: Message, names: dict[str, str]) -> None:
        await self._backend.abort([names[name] for name in message["requests"] if name in names])

    async def _load(self, message: Message, names: dict[str, str]) -> str | None:
        """Load a chunk of weights; chunks are loaded in the order in which they were sent.

        Nothing is generated between the first and the last chunk, and after a failure. Refused chunks are sent again before
        the last one.
        """
        chunk, first, last = message["chunk"], message["first"], message["last"]
        async with self._loading:
            if chunk is None and first and last:
                self._version = message["version"]  # only the version changes
                return None
            if self._broken and not first:
                raise GenerationError(
                    f"weights of version {self._incomplete} arrived only in part: send all of them again"
                )
            self._incomplete, self._broken = message["version"], True
            if first:
                await self._backend.begin_weights(message["version"])
            if chunk is not None:
                whole = await self._whole_weights(chunk, message.get("entries"))
                if whole is None:
                    self._broken = False
                    return REFUSED
                await self._backend.load_weights(whole)
            if last:
                await self._backend.finish_weights()
                self._version, self._incomplete = message["version"], None
            self._broken = False
            return None

    async def _whole_weights(self, chunk: Message, entries: list[Message] | None) -> Message | None:
        """Return the chunk with whole weights, for the engine; None if a checksum is wrong."""
        if entries is None:
            self._mirror.close()  # its weights would be of another version
            return chunk
        return await asyncio.to_thread(self._mirror.apply, chunk, entries)

    async def _sleep(self, message: Message, names: dict[str, str]) -> None:
        """Put the engine to sleep. If its weights are dropped, the version is incomplete until all of them are loaded."""
        await self._backend.abort(list(names.values()))
        await self._backend.sleep(keep_weights=message["keep_weights"])
        if not message["keep_weights"]:
            self._incomplete, self._broken = self._version, True

    async def _describe(self, message: Message, names: dict[str, str]) -> Message:
        return self.description()


_STAND_INS = Path(__file__).parents[1] / "stand_ins"


def provide_torchvision(model: str) -> None:
    """Let this process and its children import the stand-in of torchvision, if a model has images and there is no torchvision.

    transformers must not be imported yet: it looks for torchvision once.
    """
    file = Path(model) / "config.json"
    if not file.is_file() or "vision_config" not in json.loads(file.read_text()):
        return
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(_STAND_INS))
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*([before] if before else []), str(_STAND_INS)])


_BACKENDS = {
    "vllm": "vllm_backend:VllmBackend",
    "vllm with LoRA": "vllm_adapters:VllmAdapterBackend",
    "vllm with pooling": "vllm_scores:VllmScorer",
    "sglang": "sglang_backend:SglangBackend",
    "trtllm": "trtllm_backend:TrtllmBackend.start",
    "native": "native_backend:NativeBackend",
}
"""Engine to ``module:callable``: a class, or a coroutine function that starts the engine."""


async def open_backend(settings: BackendSettings) -> Backend:
    """Start the engine of the settings.

    Raises:
        ValueError: there is no backend for the engine.
    """
    name = settings.engine
    if name == "vllm":
        name += (
            " with LoRA" if settings.lora else " with pooling" if settings.options.get("runner") == "pooling" else ""
        )
    if name not in _BACKENDS:
        raise ValueError(f"no server for engine '{settings.engine}'")
    if settings.engine == "vllm":
        provide_torchvision(settings.model)
    module, _, attributes = _BACKENDS[name].partition(":")
    start: Any = import_module(f"hone.generation.server.{module}")
    for attribute in attributes.split("."):
        start = getattr(start, attribute)
    backend = start(settings)
    return await backend if inspect.isawaitable(backend) else backend


_WATCH_SECONDS = 0.5


def main() -> None:
    """Serve until the parent ends."""
    plan = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log
    threading.Thread(target=_watch, args=(plan["parent"],), name="parent watch", daemon=True).start()
    if plan["cpus"]:
        os.sched_setaffinity(0, plan["cpus"])
    try:
        asyncio.run(_serve(plan, answers))
    except BaseException as error:  # noqa: BLE001 - the parent waits for a message in every case
        _send(answers, {"error": messages.error_as_message(error)})
        raise


async def _serve(plan: dict[str, Any], answers: Any) -> None:
    names = {field.name for field in dataclasses.fields(BackendSettings)}
    settings = BackendSettings(**{name: value for name, value in plan.items() if name in names})
    backend = await open_backend(settings)
    server = EngineServer(backend, settings, plan["token"])
    try:
        listening = await asyncio.start_server(
            server.connected, plan["host"], plan["port"], limit=2**20, backlog=socket.SOMAXCONN
        )
    except OSError as error:
        backend.close()
        raise ConfigError(
            f"the engine cannot listen at {plan['host']}:{plan['port']}: {error.strerror or error}",
            why="another process uses the port",
            fix="another --port, or 0 for any free one",
        ) from error
    port = listening.sockets[0].getsockname()[1]  # the free one that port 0 asks for
    _send(answers, {"port": port, "description": server.description()})
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with listening:
        await stop.wait()
    backend.close()


def _send(answers: Any, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(message), file=answers, flush=True)  # noqa: T201 - the parent reads it


def _watch(parent: int) -> None:
    """Kill the process group when the parent has ended; runs in a thread, because the main thread may be busy."""
    while os.getppid() == parent:
        if select.select([0], [], [], _WATCH_SECONDS)[0] and not os.read(0, 4096):
            break
    os.killpg(os.getpgid(0), signal.SIGKILL)
