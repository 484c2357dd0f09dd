"""Client of a program in another Python environment; requests and answers are JSON lines."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from hone.agents.program.process import ProgramFailed
from hone.errors import ConfigError

_TAIL_LINES = 40
_END_SECONDS = 5.0


class Bridge:
    """Running program. It leads a new process group and ends when its standard input closes, so also after this process ends."""

    def __init__(self, command: Sequence[str]) -> None:
        self._numbers, self._lock, self._pen = itertools.count(1), threading.Lock(), threading.Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._ended = False
        self._errors: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen_to_errors, name="hone-bridge-errors", daemon=True)
        self._listener.start()
        threading.Thread(target=self._listen, name="hone-bridge", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, op: str, **fields: Any) -> Future[dict[str, Any]]:
        """Send a request and return the future of its answer. Cancelling the future cancels the request.

        The future raises :class:`ProgramFailed` when the program ends before it answers, or reports a failure.
        """
        number, answer = next(self._numbers), Future[dict[str, Any]]()
        with self._lock:
            if self._ended:
                answer.set_exception(self._over())
                return answer
            self._waiting[number] = answer
        answer.add_done_callback(lambda future: self._done(number, future))
        self._write({"id": number, "op": op, **fields})
        return answer

    def close(self) -> None:
        """End the program and the processes that it started."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _done(self, number: int, future: Future[dict[str, Any]]) -> None:
        with self._lock:
            self._waiting.pop(number, None)
        if future.cancelled():
            self._write({"id": next(self._numbers), "op": "cancel", "of": number})

    def _write(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        line = json.dumps(request, default=str) + "\n"
        with (
            contextlib.suppress(OSError, ValueError),
            self._pen,
        ):  # the program has ended: the listener fails waiting futures
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            with self._lock:
                future = self._waiting.get(answer["id"])
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if "failed" in answer:
                future.set_exception(ProgramFailed(f"{answer['failed']}\n{answer.get('trace', '')}".rstrip()))
            else:
                future.set_result(answer)
        self.process.wait()
        self._listener.join(1.0)
        with self._lock:
            self._ended, waiting = True, list(self._waiting.values())
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._over())

    def _listen_to_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line)

    def _over(self) -> ProgramFailed:
        return ProgramFailed(f"the program ended with code {self.process.returncode}: {''.join(self._errors)}")


def verifiers_bridge(python: str | None, where: str) -> Bridge:
    """Start the program that plays verifiers' environments; ``where`` is the key of the interpreter's path, for the error."""
    why = "verifiers and its environments run in the Python environment where they are installed"
    return start_bridge(Path(__file__).with_name("verifiers_bridge.py"), python, why, where)


def start_bridge(program: Path, python: str | None, why: str, where: str) -> Bridge:
    """Start a program with another Python, None for this one; ``where`` is the key of the interpreter's path, for the error.

    Raises:
        ConfigError: there is no such interpreter, ``why`` it is needed.
    """
    interpreter = sys.executable if python is None else str(Path(python).expanduser())
    try:
        return Bridge([interpreter, "-P", str(program)])  # -P: do not import from the program's folder
    except OSError as error:
        raise ConfigError(
            f"cannot start the Python interpreter {interpreter}: {error.strerror}",
            why=why,
            fix=f"{where}=/path/to/venv/bin/python",
            where=where,
        ) from error
