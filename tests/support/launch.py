"""Real processes that run the `hone` command or Python: forks of a process that has imported the heavy libraries once."""

import contextlib
import functools
import io
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

from support.patience import LONG

TESTS = Path(__file__).parents[1]


@dataclass
class Ended:
    """How a command ended. ``code`` is negative when a signal killed it, as subprocess has it."""

    code: int
    output: str

    @property
    def message(self) -> str:
        """The output with the whitespace of line breaks squeezed."""
        return " ".join(self.output.split())


def run_hone(words: list[str]) -> None:
    """`hone WORDS`."""
    from hone.cli.main import main

    main(words)


def run_source(words: list[str]) -> None:
    """`python -` with the first word as the program."""
    sys.path.insert(0, "")
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(words[0], "<stdin>", "exec"), module.__dict__)


RUNNING: list[multiprocessing.process.BaseProcess] = []
"""Commands that were started."""


def stop_all(since: int) -> None:
    """Kill the commands that a test started and left, with what they started: it failed, and they would take the cores of others."""
    for process in RUNNING[since:]:
        if process.is_alive() and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    del RUNNING[since:]


class Command:
    """A running `hone` command in a process group of its own; ``prepare`` is called in its process first.

    Args:
        run: what else to do with the arguments, such as :func:`run_source`.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        log: Path,
        cwd: Path | None = None,
        prepare: Callable[[], None] | None = None,
        run: Callable[[list[str]], None] = run_hone,
    ) -> None:
        self.log = log
        words = [str(argument) for argument in arguments]
        self.process = context().Process(target=_run, args=(run, words, str(log), str(cwd) if cwd else None, prepare))
        self.process.start()
        RUNNING.append(self.process)

    def wait(self, timeout: float = LONG) -> Ended:
        """Wait for its end."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"the command did not end within {timeout} s:\n{self.log.read_text()}")
        code = self.process.exitcode
        assert code is not None
        return Ended(code, self.log.read_text() if self.log.exists() else "")

    def wait_until(self, condition: Callable[[], bool], timeout: float = LONG) -> bool:
        """Wait for something that the command does; false when it ended before."""
        end = time.monotonic() + timeout
        while not condition():
            if not self.process.is_alive():
                return False
            if time.monotonic() > end:
                raise TimeoutError(f"waited {timeout} s in vain:\n{self.log.read_text()}")
            time.sleep(0.002)
        return True

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to it, or, as a terminal does, to it and all it started."""
        assert self.process.pid is not None
        (os.killpg if group else os.kill)(self.process.pid, number)


def hone(
    *arguments: object,
    log: Path,
    cwd: Path | None = None,
    prepare: Callable[[], None] | None = None,
    timeout: float = LONG,
) -> Ended:
    """Run a command to its end."""
    return Command(arguments, log, cwd, prepare).wait(timeout)


def set_environment(values: dict[str, str]) -> None:
    """A ``prepare`` that sets environment variables."""
    os.environ.update(values)


def kill(command: Command) -> int:
    """SIGKILL, as the kernel does when memory is out; returns the exit code."""
    command.signal(signal.SIGKILL)
    return command.wait().code


@functools.cache
def context() -> multiprocessing.context.ForkServerContext:
    """Starts processes as forks of one that has done the imports."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["support.warm"])
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{TESTS}{os.pathsep}{before}"  # the server looks for what it preloads nowhere else
    try:
        forkserver.ensure_running()
    finally:
        os.environ["PYTHONPATH"] = before
    return forking


def _run(
    run: Callable[[list[str]], None],
    arguments: list[str],
    log: str,
    cwd: str | None,
    prepare: Callable[[], None] | None,
) -> None:
    os.setpgid(0, 0)
    if cwd:
        os.chdir(cwd)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    sys.argv = ["hone", *arguments]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if prepare is not None:
        prepare()
    with contextlib.suppress(BrokenPipeError):
        run(arguments)
