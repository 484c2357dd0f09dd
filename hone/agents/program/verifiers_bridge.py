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
import contextlib
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
            old = hasattr(importlib.import_module("verifiers"), "load_environment")
            self._loaded[key] = (_Environment if old else _Taskset)(name, arguments)
        return self._loaded[key]


class _Environment:
    """An environment of verifiers before 0.4."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self._environment = importlib.import_module("verifiers").load_environment(name, **arguments)

    def rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Return the first rows of the environment's dataset, in the order of the seed."""
        return [dict(row) for row in self._environment.get_dataset(n=count, seed=seed)]

    async def play(self, row: dict[str, Any], base_url: str, key_variable: str, model: str) -> dict[str, Any]:
        types, clients = importlib.import_module("verifiers.types"), importlib.import_module("verifiers.clients")
        config = types.ClientConfig(
            client_type="openai_chat_completions",
            api_key_var=key_variable,
            api_base_url=base_url,
            max_retries=0,
            max_connections=16,
        )
        client = clients.resolve_client(config)
        try:
            rollout = await self._environment.run_rollout(row, client, model, {})
        finally:
            await client.close()
        error = rollout.get("error")
        message = str(error.get("error_chain_str") or error) if isinstance(error, dict) else error and str(error)
        by_model = error is not None and any(name in str(error) for name in BY_MODEL)
        return _answer(rollout.get("reward"), rollout.get("metrics"), message, by_model=by_model)


class _Taskset:
    """A taskset of verifiers from 0.4 on, played by its environment.

    ``arguments`` are the environment's configuration. Where it does not say how an agent runs, that is the chat loop without tools of its
    own (``null``), as a process of this machine: other harnesses run what the model writes.
    """

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        agents = importlib.import_module("verifiers.v1.configs.agent")
        roles = agents.agent_config_fields(loaders.env_config_type(name, arguments.get("id", ""))())
        local = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        played = {role: {**local, **arguments.get(role, {})} for role in roles}
        taskset = {**arguments.get("taskset", {}), "id": name}
        self._environment = loaders.load_environment(
            loaders.resolve_env_config({**arguments, **played, "taskset": taskset})
        )
        self._unread, self._tasks = iter(self._environment.taskset), list[Any]()
        self._serving, self._starts = contextlib.AsyncExitStack(), asyncio.Lock()
        self._started = False

    def rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Return the first tasks, all of them for a negative ``count``; in the order of the seed where their number is finite."""
        taskset = self._environment.taskset
        if not taskset.bounded and count < 0:
            raise RuntimeError("the taskset is infinite: ask for fewer rows")
        tasks = taskset.shuffle(seed) if taskset.bounded else taskset
        return [self._row(task.data) for task in (tasks if count < 0 else tasks.take(count))]

    @staticmethod
    def _row(data: Any) -> dict[str, Any]:
        prompt = data.model_dump(mode="json", include={"prompt"})["prompt"]
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt or data.name or f"task {data.idx}"}]
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        return {"prompt": [*system, *prompt], "answer": "", "example_id": data.idx}

    def _task(self, number: int) -> Any:
        while len(self._tasks) <= number:
            self._tasks.append(next(self._unread))
        return self._tasks[number]

    async def play(self, row: dict[str, Any], base_url: str, key_variable: str, model: str) -> dict[str, Any]:
        v1 = importlib.import_module("verifiers.v1")
        async with self._starts:
            if not self._started:
                await self._serving.enter_async_context(self._environment.serving())
                self._started = True
        client = v1.EvalClientConfig(base_url=base_url, api_key_var=key_variable)
        context = v1.ModelContext(model=model, client=client)
        episode = await self._environment.run_episode(self._task(row["example_id"]), context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        facts = {name: one.value for trace in episode.traces for name, one in trace.rewards.items() if one is not None}
        facts |= {name: value for trace in episode.traces for name, value in trace.metrics.items()}
        message = "; ".join(f"{error.type}: {error.message}" for error in errors) or None
        if message is None and not episode.ok:
            message = "the episode did not end"
        return _answer(sum(trace.reward for trace in episode.traces), facts, message, by_model=False)


def _answer(reward: Any, facts: Any, error: str | None, *, by_model: bool) -> dict[str, Any]:
    numbers = {
        str(name): float(value) for name, value in (facts or {}).items() if isinstance(value, (bool, int, float))
    }
    return {"reward": reward, "facts": numbers, "error": error, "by_model": by_model}


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
        variable = f"HONE_EPISODE_KEY_{number}"
        try:
            environment = environments.get(request)
            if request["op"] == "play":
                os.environ[variable] = request["api_key"]
                answer = await environment.play(request["row"], request["base_url"], variable, request["model"])
            else:
                answer = {"rows": environment.rows(request["count"], request["seed"])}
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of an environment is reported as the answer
            trace = "".join(traceback.format_exception(error))
            answer = {"failed": f"{type(error).__name__}: {error}", "trace": trace[-4000:]}
        finally:
            os.environ.pop(variable, None)
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
