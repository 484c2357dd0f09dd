"""A pool of worker processes in which every call has its own time limit.

Calls travel in chunks, so that a cheap function costs little more than its own time; results come back one by one, so the
pool always knows which call is running and since when. A call that runs out of time, or takes its process down, costs that
one call: the process is replaced and the rest of its chunk is queued again. Each worker is fed by a thread, hence the pool
belongs to no event loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hone.errors import RewardError
from hone.insight import activity
from hone.rewards.outcome import TIMEOUT, failed
from hone.rewards.score import Score
from hone.rewards.worker import LoadFailure, Ready, Target

START_TIMEOUT = 180.0
"""Seconds a worker may take to import the reward function's file."""
MAX_CHUNK = 64
ENDED = "the worker process ended"
"""Beginning of ``Score.error`` when a call took its process down."""
ASYNC_GRACE = 1.0
"""Seconds beyond the limit that a worker gets to cancel its own asynchronous calls."""


_ROOT = str(Path(__file__).resolve().parents[2])
# the worker must find this very package, and then the same modules as any other program
_PROGRAM = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); import hone; sys.path.remove({_ROOT!r}); "
    "from hone.rewards.worker import main; main()"
)

logger = logging.getLogger("hone.rewards")


@dataclass
class Outcome:
    """A score, and the traceback when the function raised; of a call that scored a batch, all its scores."""

    score: Score
    traceback: str | None = None
    batch: list[Score] | None = None


@dataclass
class Job:
    """One batch of calls.

    Attributes:
        outcomes: of each call; None where the job was given up before.
        max_failures: give the job up when more calls than this have failed.
        done: resolves to ``outcomes``.
    """

    outcomes: list[Outcome | None]
    max_failures: int
    missing: int
    failures: int = 0
    done: Future[list[Outcome | None]] = field(default_factory=Future)


@dataclass
class _Task:
    job: Job
    index: int
    payload: bytes
    alone: bool = False


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    connection: Connection
    is_async: bool

    def kill(self) -> int:
        """End it and everything it started; returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        activity.forget(self.popen.pid)
        self.connection.close()
        return self.popen.wait()


class WorkerPool:
    """Processes that call one target.

    Args:
        target: what they call.
        num_workers: how many.

    Raises:
        RewardError: the target cannot be loaded.
    """

    def __init__(self, target: Target, num_workers: int) -> None:
        self.target = target
        self._tasks: deque[_Task] = deque()
        self._wake = threading.Condition()
        self._closed = False
        first = _start(target)  # raises here, before anything is generated
        self._threads = [
            threading.Thread(target=self._serve, args=(first if number == 0 else None,), daemon=True)
            for number in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, calls: Sequence[dict[str, Any]], *, max_failures: int) -> Job:
        """Queue calls (keyword arguments each); ``job.done`` resolves to their outcomes, in order."""
        job = Job([None] * len(calls), max_failures, len(calls))
        tasks: list[_Task] = []
        for index, call in enumerate(calls):
            try:
                tasks.append(_Task(job, index, pickle.dumps(call)))
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                self._settle(job, index, Outcome(failed(f"arguments cannot be sent to a worker: {error}")))
        if not calls:
            job.done.set_result([])
        with self._wake:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._tasks.extend(task for task in tasks if not _given_up(job))
            self._wake.notify_all()
        return job

    def give_up(self, job: Job) -> None:
        """Drop what is still queued of a job."""
        with self._wake:
            self._tasks = deque(task for task in self._tasks if task.job is not job)

    def close(self) -> None:
        """End all workers; jobs still running are cancelled."""
        with self._wake:
            self._closed = True
            for task in self._tasks:
                task.job.done.cancel()
            self._tasks.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    # threads ---------------------------------------------------------------------------------------------------------

    def _serve(self, process: _Process | None) -> None:
        while tasks := self._take():
            if process is not None and process.popen.poll() is not None:
                process.kill()
                process = None
            if process is None:
                try:
                    process = _start(self.target)
                except RewardError as error:
                    self._fail(tasks, error)
                    continue
            process = self._run(process, tasks)
        if process is not None:
            process.kill()

    def _take(self) -> list[_Task]:
        """The next chunk, smaller as the queue runs out so that workers finish together; empty when the pool closes."""
        with self._wake:
            while not self._closed:
                while self._tasks and _given_up(self._tasks[0].job):
                    self._tasks.popleft()
                if self._tasks:
                    break
                self._wake.wait()
            if self._closed:
                return []
            if self._tasks[0].alone:
                return [self._tasks.popleft()]
            size = max(1, min(MAX_CHUNK, len(self._tasks) // (2 * len(self._threads))))
            chunk: list[_Task] = []
            while self._tasks and len(chunk) < size and not self._tasks[0].alone:
                chunk.append(self._tasks.popleft())
            return chunk

    def _run(self, process: _Process, tasks: list[_Task]) -> _Process | None:
        """Run a chunk; returns None if the process had to be ended."""
        waiting = dict(enumerate(tasks))
        limit = self.target.timeout + (ASYNC_GRACE if process.is_async else 0.0)
        try:
            process.connection.send([(number, task.payload) for number, task in waiting.items()])
            while waiting:
                if not self._wait(process.connection, limit):
                    process.kill()
                    self._blame(waiting, process, f"{TIMEOUT}: no answer within {self.target.timeout:g} s")
                    return None
                number, said, trace = process.connection.recv()
                task = waiting.pop(number)
                outcome = Outcome(said[0], trace, said) if isinstance(said, list) else Outcome(said, trace)
                self._settle(task.job, task.index, outcome)
        except (EOFError, OSError):
            code = process.kill()
            self._blame(waiting, process, f"{ENDED} (exit code {code})")
            return None
        return process

    def _wait(self, connection: Connection, limit: float) -> bool:
        """Wait for a message; false when ``limit`` seconds pass, or at once when the pool closes."""
        deadline = time.monotonic() + limit
        while (left := deadline - time.monotonic()) > 0 and not self._closed:
            if connection.poll(min(left, 0.25)):
                return True
        return connection.poll(0)

    def _blame(self, waiting: dict[int, _Task], process: _Process, error: str) -> None:
        """Charge the call that was running and queue the others again, at the front.

        Synchronous calls run in order: the first without a result is the one. Of several asynchronous calls anyone may
        have blocked the process, so each of them gets a process to itself.
        """
        tasks = list(waiting.values())
        if self._closed:
            for task in tasks:
                task.job.done.cancel()
            return
        if not process.is_async or len(tasks) == 1:
            culprit = tasks.pop(0)
            self._settle(culprit.job, culprit.index, Outcome(failed(error)))
        again = [
            _Task(task.job, task.index, task.payload, process.is_async) for task in tasks if not _given_up(task.job)
        ]
        with self._wake:
            self._tasks.extendleft(reversed(again))
            self._wake.notify_all()

    def _settle(self, job: Job, index: int, outcome: Outcome) -> None:
        with self._wake:
            job.outcomes[index] = outcome
            activity.tick()
            job.missing -= 1
            job.failures += outcome.score.error is not None
            finished = (job.missing == 0 or _given_up(job)) and not job.done.done()
        if finished:
            self.give_up(job)
            with contextlib.suppress(InvalidStateError):
                job.done.set_result(job.outcomes)

    def _fail(self, tasks: list[_Task], error: RewardError) -> None:
        for task in tasks:
            self.give_up(task.job)
            if not task.job.done.done():
                task.job.done.set_exception(error)


def _given_up(job: Job) -> bool:
    return job.failures > job.max_failures or job.done.done()


def _start(target: Target) -> _Process:
    """Start a worker and wait until it has loaded the target."""
    here, there = Pipe()
    folder = activity.folder()
    popen = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(there.fileno()), *([str(folder)] if folder else [])],
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what a reward function prints goes to standard error: standard output belongs to the command
        env={"OMP_NUM_THREADS": "1", **os.environ},
        start_new_session=True,  # an interrupt at the terminal is the trainer's to handle
    )
    there.close()
    process = _Process(popen, here, is_async=False)  # pyright: ignore[reportArgumentType]
    try:
        here.send(target)
        answer = here.recv() if here.poll(START_TIMEOUT) else None
    except (EOFError, OSError):
        code = process.kill()
        raise RewardError(
            f"the worker process of {_shown(target)} ended while loading it (exit code {code})",
            fix="see what it printed above; importing the file must not exit or crash the process",
        ) from None
    if isinstance(answer, Ready):
        process.is_async = answer.is_async
        return process
    process.kill()
    if isinstance(answer, LoadFailure):
        if answer.traceback:
            logger.error("%s\n%s", answer.what, answer.traceback)
        raise RewardError(
            answer.what,
            why="without it no response can be scored",
            fix=answer.fix,
            where="reward.custom_reward_function",
        )
    raise RewardError(
        f"loading {_shown(target)} took more than {START_TIMEOUT:g} s", fix="do less when the file is imported"
    )


def _shown(target: Target) -> str:
    return target.path or f"the built-in scorers {', '.join(target.scorers)}"
