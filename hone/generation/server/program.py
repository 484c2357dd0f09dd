"""Program of an engine process: reads settings from standard input, starts the engine, reports its port and serves.

The end of standard input, or a changed parent process, means that Hone has ended. The program then kills its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import os
import select
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from hone.errors import ConfigError
from hone.generation.remote import messages
from hone.generation.server.backend import Backend, BackendSettings
from hone.generation.server.serve import EngineServer, listen

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
    name = "vllm with LoRA" if settings.engine == "vllm" and settings.lora else settings.engine
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
        listening, port = await listen(server, plan["host"], plan["port"])
    except OSError as error:
        backend.close()
        raise ConfigError(
            f"the engine cannot listen at {plan['host']}:{plan['port']}: {error.strerror or error}",
            why="another process uses the port",
            fix="another --port, or 0 for any free one",
        ) from error
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
