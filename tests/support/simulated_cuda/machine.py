"""A machine with a simulated GPU, for tests: it starts whole programs, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from support.launch import TESTS, Ended
from support.patience import LONG
from support.simulated_cuda.build import driver
from support.simulated_cuda.counters import Counters

HONE = "support.launch:run_hone"
"""The `hone` command, as a program of :meth:`Machine.start`."""


@dataclass
class EndedOnGpu(Ended):
    """How a program ended, and what it asked of the GPU. A program that was killed leaves no counters."""

    counters: Counters


class Running:
    """A running program."""

    def __init__(self, machine: Machine, process: int, log: Path, counters: Path) -> None:
        self._machine, self.process, self.log, self._counters = machine, process, log, counters

    def wait(self) -> EndedOnGpu:
        """Wait for its end."""
        code = self._machine.ask({"wait": self.process})["code"]
        counters = Counters.from_json(self._counters.read_text()) if self._counters.exists() else Counters()
        return EndedOnGpu(code, self.log.read_text(), counters)

    def wait_until(self, condition: Callable[[], bool], timeout: float = LONG) -> None:
        """Wait for something that the program does.

        Raises:
            TimeoutError: it has not happened in time.
        """
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {timeout} s in vain:\n{self.log.read_text()}")
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Send a signal to the program."""
        os.kill(self.process, number)


class Machine:
    """Starts programs on the simulated GPU; a context manager. The libraries are imported once, in its launcher."""

    def __enter__(self) -> Machine:
        """Compile the driver unless that is done, and start the launcher."""
        environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}:{TESTS.parent / 'benchmarks'}:"}
        self._launcher = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("launcher.py")), str(driver())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the launcher."""
        assert self._launcher.stdin is not None
        self._launcher.stdin.close()
        self._launcher.wait()

    def ask(self, request: dict[str, object]) -> dict[str, int]:
        """Send a request to the launcher and return its answer."""
        assert self._launcher.stdin is not None and self._launcher.stdout is not None
        self._launcher.stdin.write(json.dumps(request) + "\n")
        self._launcher.stdin.flush()
        return json.loads(self._launcher.stdout.readline())

    def start(self, program: str, words: Sequence[object], folder: Path) -> Running:
        """Start a program.

        Args:
            program: ``module:function``; the function gets the words.
            words: arguments.
            folder: working directory; output and counters are written there, under new names.
        """
        number = len(list(folder.glob("gpu-*.log")))
        log, counters = folder / f"gpu-{number}.log", folder / f"gpu-{number}.json"
        log.touch()
        request = {"program": program, "words": [str(word) for word in words], "log": str(log)}
        process = self.ask({**request, "counters": str(counters), "directory": str(folder)})["process"]
        return Running(self, process, log, counters)

    def hone(self, *words: object, folder: Path) -> EndedOnGpu:
        """Run a `hone` command to its end."""
        return self.start(HONE, words, folder).wait()

    def stop(self, program: Running) -> EndedOnGpu:
        """End a program as Ctrl-C does, and wait for it."""
        program.signal(signal.SIGINT)
        return program.wait()
