"""Run an agent's program: row in, result out, no processes left running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.errors import ConfigError

TAIL_BYTES = 65536
"""Bytes kept from the end of an agent's output."""
MODEL = "policy"
"""Model name of the trained policy in requests of agents and suites."""
_MAX_SHOWN = 2000
_POLL_SECONDS = 0.05


class ProgramFailed(Exception):
    """Error of an agent that ended without a result; it fails the episode."""


@dataclass
class ProgramOutcome:
    """Result of an agent's run."""

    reward: float | None = None  # reward of the episode; None means that the reward function computes it
    text: str | None = None  # text to score; None means all text of the model
    facts: dict[str, float] = field(default_factory=dict)  # named numbers, for metrics and scorers

    @classmethod
    def parse(cls, value: Any) -> ProgramOutcome:
        """Parse a returned value or decoded JSON line: None, a number, text, or an object with these keys."""
        if value is None:
            return cls()
        if isinstance(value, bool | int | float):
            return cls(reward=float(value))
        if isinstance(value, str):
            return cls(text=value)
        wrong = ProgramFailed(
            f'the agent\'s result is {value!r:.200}, not {{"reward": 1.0, "text": "...", "facts": {{}}}}'
        )
        if not isinstance(value, Mapping) or not value.keys() <= {"reward", "text", "facts"}:
            raise wrong
        reward, text, facts = value.get("reward"), value.get("text"), value.get("facts") or {}
        if not (reward is None or isinstance(reward, bool | int | float)) or not (
            text is None or isinstance(text, str)
        ):
            raise wrong
        if not isinstance(facts, Mapping) or not all(
            isinstance(number, bool | int | float) for number in facts.values()
        ):
            raise wrong
        numbers = {str(name): float(number) for name, number in facts.items()}
        return cls(None if reward is None else float(reward), text, numbers)


async def run_program(command: Sequence[str], row: Mapping[str, Any], variables: Mapping[str, str]) -> ProgramOutcome:
    """Run an agent's program to its end.

    The program receives the row as JSON on standard input. If the last line of its standard output is JSON, it is the result;
    see :class:`ProgramOutcome`.

    Raises:
        ProgramFailed: the program exited with a nonzero code, or its result is invalid.
    """
    try:
        output = await run_to_end(command, variables, json.dumps(row, default=str).encode() + b"\n")
    except OSError as error:
        raise ConfigError(
            f"the agent's program '{command[0]}' cannot be started: {error.strerror}",
            where="actor_rollout_ref.rollout.agent.program.command",
            fix="give the program and its arguments as a list, as in [python, my_agent.py]",
        ) from error
    except ProgramFailed as failed:
        raise ProgramFailed(f"the agent's program {failed}") from None
    return ProgramOutcome.parse(last_json(output))


async def run_to_end(
    command: Sequence[str], variables: Mapping[str, str], given: bytes = b"", *, shown: bool = False
) -> str:
    """Run a program to its end; return the end of its standard output.

    It leads a new process group, which is killed when the program ends or the caller is cancelled.

    Args:
        variables: set in addition to this process's environment.
        given: standard input.
        shown: write all of its output to this process's standard error instead.

    Raises:
        ProgramFailed: the program exited with a nonzero code.
        OSError: it cannot be started.
    """
    where = 2 if shown else asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=where,
        stderr=where,
        start_new_session=True,
        env={**os.environ, **variables},
    )
    assert process.stdin is not None
    output, errors = _Tail(), _Tail()
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the program does not read its row
            process.stdin.write(given)
            await process.stdin.drain()
        process.stdin.close()
        reading = asyncio.gather(output.read(process.stdout), errors.read(process.stderr))
        while process.returncode is None:  # process.wait() would also wait for children that hold its output open
            await asyncio.sleep(_POLL_SECONDS)
        code = process.returncode
        _kill_group(process.pid)
        await reading
    finally:
        _kill_group(process.pid)
        if process.returncode is None:
            await process.wait()
    if code != 0:
        tail = errors.text()[-_MAX_SHOWN:] or output.text()[-_MAX_SHOWN:]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise ProgramFailed(f"{how}: {tail}")
    return output.text()


def last_json(text: str) -> Any:
    """Return the JSON value of the last non-empty line, or None if it is not JSON."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


class _Tail:
    def __init__(self) -> None:
        self._bytes = bytearray()

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (chunk := await stream.read(65536)):
            self._bytes += chunk
            del self._bytes[:-TAIL_BYTES]

    def text(self) -> str:
        return self._bytes.decode(errors="replace")


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


_SECONDS = 30.0
_ASK = (
    "import json, sys; from importlib import metadata\n"
    "found = {one.metadata['Name'].lower().replace('_', '-'): one.version for one in metadata.distributions()}\n"
    "print(json.dumps({name: found.get(name) for name in sys.argv[1:]}))"
)


def versions_in(python: str, names: Sequence[str], where: str = "--python") -> dict[str, str | None]:
    """Return the versions of packages in the environment of a Python, None for those that are missing.

    Raises:
        ConfigError: it does not run; ``where`` names the option or key.
    """
    interpreter = str(Path(python).expanduser())
    try:
        answer = subprocess.run(
            [interpreter, "-I", "-c", _ASK, *names], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        return dict(json.loads(answer.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"{interpreter} does not say which packages it has: {error}",
            fix=f"give the path of a Python, such as {sys.executable}",
            where=where,
        ) from error
