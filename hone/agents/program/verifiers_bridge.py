"""Program that plays environments of the library verifiers, in the Python environment where they are installed.

:mod:`hone.agents.program.bridge` starts it with that interpreter, so it imports nothing of Hone. Requests and answers are JSON
lines on standard input and output; all other output goes to standard error.

    {"id": 1, "op": "rows", "environment": "wordle", "arguments": {}, "count": 64, "seed": 1}
    {"id": 1, "rows": [{"prompt": [...], "answer": "...", ...}, ...]}
    {"id": 2, "op": "play", "environment": "wordle", "arguments": {}, "row": {...}, "base_url": ..., "api_key": ..., "model": ...}
    {"id": 2, "reward": 1.0, "facts": {"num_turns": 3.0}, "error": null, "by_model": false}
    {"id": 3, "op": "cancel", "of": 2}

An answer with ``failed`` reports a failed request. The program ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

BY_MODEL = ("EmptyModelResponseError", "InvalidModelResponseError", "OverlongPromptError")
"""Errors of a rollout that the model caused, as opposed to failures of the environment."""


class Environments:
    """Environments by name and arguments, each loaded once in the main thread, where signal handlers are allowed."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def get(self, request: dict[str, Any]) -> Any:
        """Return the environment that a request names, loaded on first use."""
        name, arguments = request["environment"], request["arguments"]
        key = json.dumps([name, arguments], sort_keys=True)
        if key not in self._loaded:
            library = importlib.import_module("verifiers")
            load = getattr(library, "load_environment", None)
            if load is None:
                version = getattr(library, "__version__", "?")
                raise RuntimeError(
                    f"verifiers {version} has no load_environment; environments of that kind need 'verifiers<0.4'"
                )
            self._loaded[key] = load(name, **arguments)
        return self._loaded[key]

    def rows(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the first rows of the environment's dataset, in the order of the seed."""
        dataset = self.get(request).get_dataset(n=request["count"], seed=request["seed"])
        return {"rows": [dict(row) for row in dataset]}

    async def play(self, request: dict[str, Any]) -> dict[str, Any]:
        environment = self.get(request)
        types, clients = importlib.import_module("verifiers.types"), importlib.import_module("verifiers.clients")
        variable = f"HONE_EPISODE_KEY_{request['id']}"
        os.environ[variable] = request["api_key"]
        try:
            config = types.ClientConfig(
                client_type="openai_chat_completions",
                api_key_var=variable,
                api_base_url=request["base_url"],
                max_retries=0,
                max_connections=16,
            )
            client = clients.resolve_client(config)
            try:
                rollout = await environment.run_rollout(request["row"], client, request["model"], {})
            finally:
                await client.close()
        finally:
            os.environ.pop(variable, None)
        metrics = rollout.get("metrics") or {}
        facts = {str(name): float(value) for name, value in metrics.items() if isinstance(value, (bool, int, float))}
        error = rollout.get("error")
        message = (
            None
            if error is None
            else str(error.get("error_chain_str") or error)
            if isinstance(error, dict)
            else str(error)
        )
        by_model = message is not None and any(name in str(error) for name in BY_MODEL)
        return {"reward": rollout.get("reward"), "facts": facts, "error": message, "by_model": by_model}


class Answers:
    def __init__(self, descriptor: int) -> None:
        self._file, self._lock = os.fdopen(descriptor, "w", encoding="utf-8"), threading.Lock()

    def give(self, number: int, answer: dict[str, Any]) -> None:
        """Answer the request of this number."""
        line = json.dumps({"id": number, **answer}, default=str)
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()


async def serve(requests: int, answers: Answers) -> None:
    """Process requests until standard input closes."""
    environments, tasks = Environments(), {}

    async def carry_out(request: dict[str, Any]) -> None:
        number = request["id"]
        try:
            if request["op"] == "play":
                answer = await environments.play(request)
            else:
                answer = environments.rows(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of an environment is reported as the answer
            trace = "".join(traceback.format_exception(error))
            answer = {"failed": f"{type(error).__name__}: {error}", "trace": trace[-4000:]}
        answers.give(number, answer)

    reader = asyncio.StreamReader(limit=2**26)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(requests, "rb", buffering=0)
    )
    while line := await reader.readline():
        request = json.loads(line)
        if request["op"] == "cancel":
            task = tasks.get(request["of"])
            if task is not None:
                task.cancel()
            continue
        task = tasks[request["id"]] = asyncio.create_task(carry_out(request))
        task.add_done_callback(lambda _, number=request["id"]: tasks.pop(number, None))


def main() -> None:
    """Reserve both pipes for the protocol, redirect all other output to standard error, and serve."""
    requests, answers = os.dup(0), os.dup(1)
    silent = os.open(os.devnull, os.O_RDONLY)
    os.dup2(silent, 0)
    os.dup2(2, 1)
    sys.path.append(str(Path.cwd()))  # an environment may be a file of the user's
    asyncio.run(serve(requests, Answers(answers)))
    os._exit(0)  # do not wait for threads of an environment's scorers


if __name__ == "__main__":
    main()
