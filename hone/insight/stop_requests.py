"""Requests to a run, files in its directory because the run may be on another machine: to stop it, and for its replicas.

<run>/STOP                    written by `hone stop`, or by hand: an empty file ends the run after its step
<run>/replicas.request.json   a request of `hone runs engines`, until the run takes it; a newer one replaces it
<run>/replicas.json           the run's answer to the last request

A run that ends after its step removes the file STOP. After a stop at once it remains, so that nothing restarts the run before somebody
removes it with `hone stop RUN --clear`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hone.errors import HoneError
from hone.insight.run_files import author, now, write_atomically

REQUEST, ANSWER, _TAKEN = "replicas.request.json", "replicas.json", ".replicas.request.json.taken"


@dataclass(frozen=True)
class ReplicaRequest:
    """Request to report on the replicas, and to change their number."""

    replicas: int | None = None  # wanted number per rollout worker; None changes nothing
    key: str = field(default_factory=lambda: uuid.uuid4().hex)  # identity of the request, which its answer repeats


@dataclass(frozen=True)
class ReplicaAnswer:
    """Answer of the run."""

    key: str
    wanted: int  # wanted number of replicas per rollout worker
    limit: int  # maximum of that number
    # report on each replica: number, worker, state, requests, limit, version of its weights, starts, problem
    replicas: list[dict[str, Any]]
    # what, why and fix of the error if the request was refused; empty otherwise
    refused: dict[str, str] = field(default_factory=dict)
    at: str = field(default_factory=now)  # time of the answer


def send_request(run: Path, request: ReplicaRequest) -> None:
    """Write a request for the run in this directory.

    Raises HoneError: the directory is not writable, or the disk is full.
    """
    write_atomically(run / REQUEST, json.dumps(asdict(request)))


def take_request(run: Path) -> ReplicaRequest | None:
    """Take the request out of a run directory; None without one. Raises HoneError: the file is not a request."""
    taken = run / _TAKEN
    try:
        (run / REQUEST).rename(taken)
    except FileNotFoundError:
        return None
    try:
        request = ReplicaRequest(**json.loads(taken.read_text(encoding="utf-8")))
        if type(request.replicas) not in (int, type(None)):
            raise ValueError(f"replicas is {request.replicas!r}, not a whole number")
        return request
    except (ValueError, TypeError) as error:
        raise HoneError(
            f"the file is not a request: {error}", where=str(run / REQUEST), fix="hone runs engines RUN --replicas N"
        ) from None
    finally:
        taken.unlink()


def withdraw_request(run: Path) -> None:
    (run / REQUEST).unlink(missing_ok=True)


def write_answer(run: Path, answer: ReplicaAnswer) -> None:
    write_atomically(run / ANSWER, json.dumps(asdict(answer), indent=2))


def read_answer(run: Path, key: str) -> ReplicaAnswer | None:
    """Return the answer to the request with this key; None while there is none."""
    try:
        answer = ReplicaAnswer(**json.loads((run / ANSWER).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    return answer if answer.key == key else None


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
