"""One run of an agent's program: row in, result out, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.errors import ConfigError

TAIL_BYTES = 65536
"""What is kept of the end of an agent's output."""
_SHOWN = 2000
_POLL_SECONDS = 0.05


class ProgramFailed(Exception):
    """The agent's program ended without a result: it breaks its episode."""


@dataclass
class Outcome:
    """What an agent says at its end.

    Attributes:
        reward: of the episode; None leaves it to the reward function.
        text: to be scored in place of everything the model said; None for that.
        facts: named numbers, for metrics and scorers.
    """

    reward: float | None = None
    text: str | None = None
    facts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, said: Any) -> Outcome:
        """The outcome in a returned value or in a decoded line of JSON: nothing, a number, or an object with these names.

        Raises:
            ProgramFailed: it is something else.
        """
        if said is None:
            return cls()
        if isinstance(said, bool | int | float):
            return cls(reward=float(said))
        if isinstance(said, str):
            return cls(text=said)
        wrong = ProgramFailed(
            f'the agent\'s result is {said!r:.200}, not {{"reward": 1.0, "text": "...", "facts": {{}}}}'
        )
        if not isinstance(said, Mapping) or not said.keys() <= {"reward", "text", "facts"}:
            raise wrong
        reward, text, facts = said.get("reward"), said.get("text"), said.get("facts") or {}
        if not (reward is None or isinstance(reward, bool | int | float)) or not (
            text is None or isinstance(text, str)
        ):
            raise wrong
        if not isinstance(facts, Mapping) or not all(isinstance(value, bool | int | float) for value in facts.values()):
            raise wrong
        numbers = {str(name): float(value) for name, value in facts.items()}
        return cls(None if reward is None else float(reward), text, numbers)


async def run_program(command: Sequence[str], row: Mapping[str, Any], variables: Mapping[str, str]) -> Outcome:
    """Run an agent to its end.

    It gets the row as JSON on its standard input, and the environment of this process with ``variables``. The last line of its
    standard output is its result, if it is JSON; see :class:`Outcome`. It leads a process group of its own, all of which is killed
    when it ends, and when the caller is cancelled.

    Raises:
        ConfigError: there is no such program.
        ProgramFailed: it ended with another code than 0, or its result cannot be read.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **variables},
        )
    except OSError as error:
        raise ConfigError(
            f"the agent's program '{command[0]}' cannot be started: {error.strerror}",
            where="actor_rollout_ref.rollout.agent.program.command",
            fix="give the program and its arguments as a list, as in [python, my_agent.py]",
        ) from error
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    output, errors = _Tail(), _Tail()
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it does not want its row
            process.stdin.write(json.dumps(row, default=str).encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        reading = asyncio.gather(output.read(process.stdout), errors.read(process.stderr))
        while (
            process.returncode is None
        ):  # process.wait() would wait for what it left running, which holds its output open
            await asyncio.sleep(_POLL_SECONDS)
        code = process.returncode
        _kill_group(process.pid)
        await reading
    finally:
        _kill_group(process.pid)
        if process.returncode is None:
            await process.wait()
    if code != 0:
        shown = errors.text()[-_SHOWN:] or output.text()[-_SHOWN:]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise ProgramFailed(f"the agent's program {how}: {shown}")
    return Outcome.of(last_json(output.text()))


def last_json(text: str) -> Any:
    """The value on the last line that is not empty, None when it is no JSON."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


class _Tail:
    def __init__(self) -> None:
        self._bytes = bytearray()

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(65536):
            self._bytes += chunk
            del self._bytes[:-TAIL_BYTES]

    def text(self) -> str:
        return self._bytes.decode(errors="replace")


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
