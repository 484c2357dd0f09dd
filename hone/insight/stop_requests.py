"""Requests to stop a run: a file in its directory, because the run may be on another machine.

<run>/STOP      written by `hone stop`, or by hand: an empty file ends the run after its step

A run that ends after its step removes the file. After a stop at once it remains, so that nothing restarts the run before somebody
removes it with `hone stop RUN --clear`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from hone.errors import HoneError
from hone.insight.run_files import author, now, write_atomically

STOP = "STOP"
PERIOD = 0.5  # seconds between two looks for a request to stop at once
GRACE = 10.0
"""Seconds that a run and its tools have to end by themselves after such a request; then their processes are killed."""
INTERRUPTED = 130  # exit code of a run that was stopped at once

log = logging.getLogger("hone")


@dataclass(frozen=True)
class StopRequest:
    """Request to stop a run."""

    # True ends it with its tools within :data:`GRACE` seconds; False ends it after its step, and saves
    at_once: bool = False
    reason: str = ""
    by: str = field(default_factory=author)  # user and machine
    at: str = field(default_factory=now)  # time of the request

    def __str__(self) -> str:
        return f"{self.by} at {self.at}{f': {self.reason}' if self.reason else ''}"


def send_stop(run: Path, request: StopRequest) -> None:
    """Write a request for the run in this directory.

    Raises HoneError: the directory is not writable, or the disk is full.
    """
    write_atomically(run / STOP, json.dumps(asdict(request)) + "\n")


def read_stop(run: Path) -> StopRequest | None:
    """Return the request in a run directory; None without one. Any other content of the file ends the run after its step."""
    try:
        content = (run / STOP).read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return StopRequest(**json.loads(content))
    except (ValueError, TypeError):
        return StopRequest(reason=f"the file {run / STOP}", by="unknown", at="an unknown time")


def clear_stop(run: Path) -> bool:
    """Remove a request, so that the run may start; return whether there was one."""
    there = (run / STOP).exists()
    (run / STOP).unlink(missing_ok=True)
    return there


def check_may_start(run: Path) -> None:
    """Raise HoneError if there is a stop request from before the run's start."""
    request = read_stop(run)
    if request is not None:
        raise HoneError(
            f"the run was stopped by {request}",
            why="a stopped run does not start again by itself",
            fix=f"hone stop {run} --clear, then the same command again",
            where=str(run / STOP),
            code="E-stopped",
        )


class StopWatch:
    """Thread that ends this process when somebody requests a stop at once.

    Args:
        interrupt: called once with the request, before SIGTERM.
        kill: called if the process has not ended after :data:`GRACE` seconds, before it is killed with its children.
    """

    def __init__(
        self, run: Path, interrupt: Callable[[StopRequest], None], kill: Callable[[StopRequest], None]
    ) -> None:
        self._run, self._interrupt, self._kill = run, interrupt, kill
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hone-stop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the process does not end by itself any more."""
        self._ended.set()
        self._thread.join(1.0)

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD):
            request = read_stop(self._run)
            if request is None or not request.at_once:
                continue
            log.error("stopped at once by %s", request)
            self._interrupt(request)
            os.kill(os.getpid(), signal.SIGTERM)
            if not self._ended.wait(GRACE):
                log.error("the run has not ended within %g s; its processes are killed", GRACE)
                try:
                    self._kill(request)
                finally:
                    kill_children(services=True)
                    os._exit(INTERRUPTED)
            return


def kill_children(*, services: bool = False) -> None:
    """Kill all processes that this one started, and theirs: workers, engines and tools. ``services``: also the services
    of a Ray cluster that this process started; without them it could not end in order.
    """
    for child in psutil.Process().children(recursive=True):
        try:
            if services or not _is_ray_service(child.cmdline()):
                child.kill()
        except psutil.Error:
            continue


def _is_ray_service(words: list[str]) -> bool:
    """Return whether a command line is a service of Ray; its workers have titles that begin with ``ray::``."""
    line = " ".join(words)
    return "/ray/" in line and not line.startswith("ray::")
