"""Adapter for task directories of Harbor, the format of Terminal-Bench 2 and of other agent benchmarks.

A task is a folder with ``instruction.md``, ``task.toml``, ``environment/`` and ``tests/``. The policy gets the instruction and one
tool, ``bash``. A turn without calls ends the episode: then ``tests/test.sh`` writes the reward into ``/logs/verifier``. The policy
never sees ``solution/``, and ``tests/`` is not there before its last command has ended. Source: the package harbor 0.26.0.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

from hone.agents.environments.base import Environment, Step
from hone.agents.environments.machines import LEAST_MB, Container, HarborTask, Sandboxed, files_below, machine_for
from hone.agents.messages import AssistantTurn, Message, ToolCall, tool_message
from hone.agents.tools.base import text_schema
from hone.errors import ConfigError, NoVerdict
from hone.rewards.sandbox import Ending, Result

_BASH = text_schema("bash", "Run a command in a new bash shell and return what it prints.", "command", "the command")
KEYS = {
    "task.toml": {"environment", "verifier", "agent", "schema_version", "version"},
    "environment": {
        *("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "memory", "storage_mb", "storage", "env", "workdir"),
        *("network_mode", "allow_internet"),
    },
    "verifier": {"timeout_sec", "env", "environment_mode"},
    "agent": {"timeout_sec"},
}  # fmt: skip
"""Keys of task.toml that are read, by section. Others are refused where they have a value, except for IGNORED."""
IGNORED = {"metadata", "task", "source", "artifacts", "solution"}
"""Keys of task.toml that say nothing about how a task is played or scored here."""
VALUES = {
    **dict.fromkeys(("schema_version", "version"), r"1(\..*)?"),
    "os": "linux",
    "network_mode": "public|no-network",
    "environment_mode": "shared|none",
}
"""Patterns of the values that are supported."""
_COMMAND_BYTES = 100_000  # Linux takes arguments of up to 128 KiB
_CANARY = re.compile(r"(?i)<!--.*canary.*-->|#.*canary.*")


class VerifierFailed(NoVerdict):
    """Error of a verifier that gave no reward."""


def read_task(folder: Path) -> HarborTask:
    """Read a task directory.

    Raises:
        ConfigError: a file is missing, a link or wrong, or the task needs what is not supported.
    """
    where = folder / "task.toml"
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (folder / name).is_file() or (folder / name).is_symlink():
            raise ConfigError(
                f"the task {folder.name} has no file {name}", where=str(folder), fix="give a task of Harbor"
            )
    try:
        config = tomllib.loads(where.read_text(encoding="utf-8"))
        _, environment, verifier, agent = (_section(config, name, where) for name in KEYS)
        text = (folder / "instruction.md").read_text(encoding="utf-8")
        files_below(folder / "tests")
        network = environment.get("network_mode", "public" if environment.get("allow_internet", True) else "no-network")
        return HarborTask(
            folder,
            _without_canary(text),
            _seconds(agent.get("timeout_sec", math.inf)),
            _seconds(verifier.get("timeout_sec", 600.0)),
            _seconds(environment.get("build_timeout_sec", 600.0)),
            environment.get("docker_image"),
            network == "public",
            environment.get("workdir"),
            float(environment.get("cpus") or 1),
            _megabytes(environment, "memory") or LEAST_MB,
            _megabytes(environment, "storage") or LEAST_MB,
            _variables(environment),
            _variables(verifier),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the task {folder.name} cannot be read: {error}", where=str(where), fix="correct it"
        ) from error


def _section(config: dict[str, Any], name: str, where: Path) -> dict[str, Any]:
    """Return a section, or the whole for ``task.toml``, whose keys and values are supported."""
    section = config if name == "task.toml" else config.get(name, {})
    for key, value in section.items():
        allowed = VALUES.get(key)
        given = str(value).lower()
        unknown = key not in KEYS[name] and key not in IGNORED and value not in (None, 0, "", [], {})
        if unknown or (allowed is not None and not re.fullmatch(allowed, given)):
            raise ConfigError(
                f"the task {where.parent.name} has {key} = {value!r:.80} in [{name}], which is not supported",
                why="the task would be another one than its author scored",
                fix="use tasks without it",
                where=str(where),
            )
    return section


def _seconds(value: Any) -> float:
    if not float(value) > 0:
        raise ValueError(f"a limit of {value} seconds is not above 0")
    return float(value)


def _megabytes(environment: dict[str, Any], name: str) -> int:
    """Return ``memory_mb`` or ``storage_mb``, or the older ``memory`` or ``storage`` like "2G"; 0 without either."""
    size = str(environment.get(name) or "0M").strip().upper()
    factors = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    if size[-1] not in factors:
        raise ValueError(f"{name} = {size!r} should end in G, M or K")
    return int(environment.get(f"{name}_mb") or float(size[:-1]) * factors[size[-1]])


def _variables(section: dict[str, Any]) -> dict[str, str]:
    variables = section.get("env", {})
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or "\x00" in value:
            raise ValueError(f"{name!r} = {value!r:.80} is not a variable")
        if re.fullmatch(r"\$\{.*\}", value):
            raise ValueError(f"{name} = {value!r} is a variable of this machine, which no task gets")
    return variables


def _without_canary(text: str) -> str:
    """Leave out the first lines that only mark the text as one of a benchmark."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
        while lines and not lines[0].strip():
            lines.pop(0)
    return "\n".join(lines)


def _cut(text: str, most: int) -> str:
    half = most // 2
    left_out = len(text) - 2 * half
    return text if len(text) <= most else f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"


class Harbor(Environment):
    """A task directory of Harbor.

    Facts: ``solved`` (the reward is at least 1) and ``commands``.
    """

    tools = (_BASH,)

    def __init__(
        self,
        *,
        path: str,  # a task directory, or a folder of them, of which the seed chooses one
        container: str = "auto",  # docker, podman, none (the sandbox), or auto: the first of them that works
        ignore_build: bool = False,  # True to leave out what the sandbox cannot do of a Dockerfile
        seconds: float = 20.0,  # limit of one command
        max_output: int = 10_000,  # characters of a command's output that the policy sees
        reward: str = "reward",  # which reward of several in reward.json
    ) -> None:
        root = Path(path).expanduser().resolve()
        single = (root / "task.toml").is_file()
        self.folders = (
            [root] if single else sorted(p.parent for p in root.glob("*/task.toml") if not p.parent.is_symlink())
        )
        if not self.folders:
            raise ConfigError(
                f"there is no task.toml in {root} or in a folder of it",
                fix="path=DIR, a task directory of Harbor or a folder of them",
                where="extra_info.environment.options.path",
            )
        if not seconds > 0 or max_output < 2:
            raise ValueError(f"seconds={seconds} should be above 0, and max_output={max_output} at least 2")
        self.container, self.ignore_build = container, ignore_build
        self.seconds, self.max_output, self.key = float(seconds), int(max_output), reward
        self._lock = threading.RLock()  # one command at a time, and none after the end
        self._begin(self.folders[0] if single else None)

    def _begin(self, folder: Path | None) -> None:
        self.task = read_task(folder) if folder else None
        self.start = machine_for(self.task, self.container, ignore_build=self.ignore_build) if self.task else None
        self._machine: Sandboxed | Container | None = None
        self._used, self._commands = 0.0, 0

    async def reset(self, seed: int) -> list[Message]:
        await self.close()
        self._begin(self.folders[seed % len(self.folders)])
        assert self.task is not None
        return [{"role": "user", "content": self.task.instruction}]

    async def step(self, turn: AssistantTurn) -> Step:
        assert self.task is not None
        if turn.calls and self._used < self.task.agent_seconds:
            return Step([tool_message(call, await self._answer(call)) for call in turn.calls], facts=self._facts(0.0))
        reward = await asyncio.to_thread(self._reward)
        return Step(reward=reward, done=True, facts=self._facts(reward))

    async def close(self) -> None:
        """End what runs, and remove the files of the episode; waits for a command under way."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with self._lock:
            machine, self._machine, self.start = self._machine, None, None
            if machine is not None:
                machine.close()

    def _facts(self, reward: float) -> dict[str, float]:
        return {"solved": float(reward >= 1), "commands": float(self._commands)}

    async def _answer(self, call: ToolCall) -> str:
        command = (call.arguments or {}).get("command")
        if call.name != "bash" or not isinstance(command, str):
            return call.error or "error: there is one function, bash, with the text 'command'"
        data = command.encode(errors="replace")
        if b"\0" in data or len(data) > _COMMAND_BYTES:
            return f"error: a command has at most {_COMMAND_BYTES} bytes, and none of them is 0"
        assert self.task is not None
        limit = min(self.seconds, self.task.agent_seconds - self._used)
        if limit <= 0:
            return "error: the time for commands is over"
        self._commands += 1
        begun = time.monotonic()
        result = await asyncio.to_thread(self._run, data.decode(), limit)
        self._used += time.monotonic() - begun
        ending = f"exit code {result.exit_code}"
        if result.ending is not Ending.FINISHED:
            ending = f"stopped, with all that it started: {result.ending.value} (limit of time: {limit:.0f} s)"
        return f"{_cut(result.stdout, self.max_output).rstrip()}\n[{ending}]".lstrip()

    def _run(self, command: str, seconds: float, env: dict[str, str] | None = None) -> Result:
        with self._lock:
            return self._started().run(command, seconds, env or {}).checked()

    def _started(self) -> Sandboxed | Container:
        if self.start is None:
            raise NoVerdict("the episode is over")
        self._machine = self._machine or self.start()
        return self._machine

    def _reward(self) -> float:
        """Run the verifier and read its reward, as Harbor does: from reward.json, else from reward.txt."""
        assert self.task is not None
        name, output = self.task.folder.name, "/logs/verifier/test-stdout.txt"
        with self._lock:
            try:
                self._started().put_tests()
            except OSError as error:
                raise VerifierFailed(f"the tests of {name} cannot be put in: {error}") from error
            tested = self._run(f"/tests/test.sh > {output} 2>&1", self.task.verifier_seconds, self.task.verifier_env)
            if tested.ending is not Ending.FINISHED:
                raise VerifierFailed(f"the verifier of {name} was stopped: {tested.ending.value}")
            for file in ("reward.json", "reward.txt"):
                read = self._run(f"cat /logs/verifier/{file}", 60.0)
                if read.succeeded:
                    return self._parsed(read.stdout, file)
            end = self._run(f"tail -c 300 {output}", 60.0).stdout
        raise VerifierFailed(f"the verifier of {name} wrote no reward (exit code {tested.exit_code}): {end.strip()}")

    def _parsed(self, text: str, file: str) -> float:
        try:
            rewards = json.loads(text) if file.endswith(".json") else {self.key: float(text)}
            reward = rewards[self.key] if self.key in rewards or len(rewards) != 1 else next(iter(rewards.values()))
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise ValueError("it is not a finite number")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise VerifierFailed(f"there is no reward '{self.key}' in {file}: {error} ({text!r:.200})") from error
        return float(reward)
