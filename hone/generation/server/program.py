"""The program: reads on its standard input what to be, starts the engine, says when it is ready, and serves until told otherwise.

The end of the standard input, or another parent than the one that is named, means that Hone is gone: then it ends itself with
its whole process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import threading
from typing import Any

from hone.errors import ConfigError
from hone.generation.remote import messages
from hone.generation.server.backend import Settings, open_backend
from hone.generation.server.serve import EngineServer, listen

_WATCH_SECONDS = 0.5


def main() -> None:
    """Serve until the parent is gone."""
    told = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log
    threading.Thread(target=_watch, args=(told["parent"],), name="parent watch", daemon=True).start()
    if told["cpus"]:
        os.sched_setaffinity(0, told["cpus"])
    try:
        asyncio.run(_serve(told, answers))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the parent waits for
        _say(answers, {"error": messages.error_as_message(error)})
        raise


async def _serve(told: dict[str, Any], answers: Any) -> None:
    names = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{name: value for name, value in told.items() if name in names})
    backend = await open_backend(settings)
    server = EngineServer(backend, settings, told["token"])
    try:
        listening, port = await listen(server, told["host"], told["port"])
    except OSError as error:
        backend.close()
        raise ConfigError(
            f"the engine cannot listen at {told['host']}:{told['port']}: {error.strerror or error}",
            why="another process has the port",
            fix="another --port, or 0 for any that is free",
        ) from error
    _say(answers, {"port": port, "description": server.description()})
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with listening:
        await stop.wait()
    backend.close()


def _say(answers: Any, words: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(words), file=answers, flush=True)  # noqa: T201 - the parent reads it


def _watch(parent: int) -> None:
    """Kill the process group once the parent is gone; beside the main thread, which may be busy."""
    while os.getppid() == parent:
        if select.select([0], [], [], _WATCH_SECONDS)[0] and not os.read(0, 4096):
            break
    os.killpg(os.getpgid(0), signal.SIGKILL)
