"""Driver's side of the watchdog: start the watching process and act on its reports."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hone.errors import EXIT_FAILED, HoneError
from hone.insight.activity import birth

log = logging.getLogger("hone")

_ROOT = str(Path(__file__).resolve().parents[2])
# the watcher must import this package
_PROGRAM = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); import hone; sys.path.remove({_ROOT!r}); "
    "from hone.cluster.watcher import main; main()"
)


@dataclass(frozen=True)
class Watched:
    """Parameters of a watcher.

    Attributes:
        seconds: number of seconds without progress that count as a hang.
        driver: pid of the process that reads the reports.
        born: start of that process, as :func:`hone.insight.activity.birth` gives it. The driver says it, because it may be
            gone before its watcher has started.
    """

    run: str
    seconds: float
    driver: int
    born: int | None


@dataclass(frozen=True)
class Culprit:
    """A process that all others wait for."""

    name: str
    pid: int
    host: str


@dataclass(frozen=True)
class Hang:
    """Report of the watcher.

    Attributes:
        report: file with the wait graph and all stacks, or a description of another place.
        summary: report without the stacks.
        reason: reason for the hang, in one sentence.
        culprits: processes that all others wait for.
    """

    report: str
    summary: str
    reason: str
    culprits: tuple[Culprit, ...]


def end_run(hang: Hang) -> bool:
    """End the run: the response to a hang if no worker can be restarted."""
    del hang
    return False


class Watchdog:
    """End, or restart workers of, a run without progress.

    Args:
        run: run directory; its processes publish their activity under ``activity/``.
        seconds: number of seconds without any progress that count as a hang.
        on_hang: called in a separate thread with each hang; returns whether the run continues (the culprits were restarted).
            If it does not, the process ends with exit code 3.
    """

    def __init__(self, run: Path, seconds: float, on_hang: Callable[[Hang], bool] = end_run) -> None:
        self.run, self._on_hang = run, on_hang
        watched = Watched(str(run.resolve()), seconds, os.getpid(), birth(os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(asdict(watched))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # the trainer handles an interrupt at the terminal
        )
        self._thread = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Stop watching."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            self._send("bye")
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fields = json.loads(line)
            hang = Hang(**{**fields, "culprits": tuple(Culprit(**culprit) for culprit in fields["culprits"])})
            self._send("taken")
            if not self._on_hang(hang):
                try:
                    record_end(self.run, os.getpid(), f"hang: {hang.reason}; see {hang.report}")
                except (HoneError, OSError) as error:  # a full disk must not keep a hanging run alive
                    log.error("the failure could not be recorded in %s: %s", self.run, error)
                os._exit(EXIT_FAILED)  # the main thread hangs: nothing else would end the process
            self._send("on")

    def _send(self, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the watcher has ended and needs no message
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()


def record_end(run: Path, driver: int, reason: str) -> bool:
    """Record in run.json that the run failed, unless it has ended or another process uses the directory."""
    from hone.insight.run_directory import RunDirectory, RunStatus
    from hone.insight.run_files import RUN, read_run

    if not (run / RUN).exists():
        return False
    record = read_run(run)
    if record.get("pid") != driver or record.get("status") != RunStatus.RUNNING:  # without a status it has not started
        return False
    RunDirectory(run).update_status(RunStatus.FAILED, exit_reason=reason)
    return True
