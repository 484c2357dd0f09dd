"""The watchdog as a driver holds it: starts the watching process and acts on what that reports."""

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

from hone.cluster.watcher import Watched, record_end
from hone.errors import EXIT_FAILED, HoneError

log = logging.getLogger("hone")

_ROOT = str(Path(__file__).resolve().parents[2])
# the watcher must find this very package
_PROGRAM = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); import hone; sys.path.remove({_ROOT!r}); "
    "from hone.cluster.watcher import main; main()"
)


@dataclass(frozen=True)
class Culprit:
    """A process that holds up all others."""

    name: str
    pid: int
    host: str


@dataclass(frozen=True)
class Hang:
    """What the watcher reports.

    Attributes:
        report: file with the wait graph and all stacks, or, in words, where else they stand.
        summary: the report without the stacks.
        reason: why nothing moves, in a sentence.
        culprits: whom all others wait for.
    """

    report: str
    summary: str
    reason: str
    culprits: tuple[Culprit, ...]


def end_run(hang: Hang) -> bool:
    """What is done about a hang where nothing can be restarted: the run ends."""
    del hang
    return False


class Watchdog:
    """Ends, or lets recover, a run in which nothing moves.

    Args:
        run: the run directory; its processes publish what they do under ``activity/``.
        seconds: without any movement that make a hang.
        on_hang: called in a thread of its own with each hang; returns whether the run goes on (the culprits were restarted).
            When it does not, the process ends with exit code 3.
    """

    def __init__(self, run: Path, seconds: float, on_hang: Callable[[Hang], bool] = end_run) -> None:
        self.run, self._on_hang = run, on_hang
        watched = Watched(str(run.resolve()), seconds, os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(asdict(watched))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt at the terminal is the trainer's to handle
        )
        self._thread = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Watch no longer."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            self._say("bye")
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
            self._say("taken")
            if not self._on_hang(hang):
                try:
                    record_end(self.run, os.getpid(), f"hang: {hang.reason}; see {hang.report}")
                except (HoneError, OSError) as error:  # a full disk does not keep a run that hangs
                    log.error("%s could not be told that the run has failed: %s", self.run, error)
                os._exit(EXIT_FAILED)  # the main thread hangs: nothing else would end the process
            self._say("on")

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone, and with it the need to tell it
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
