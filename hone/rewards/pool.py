"""Pool of worker processes with a time limit for every call.

Calls are sent in chunks, so that a cheap function has little overhead. Results return one by one, so the pool always knows which
call is running and since when. If a call times out or ends its process, only that call fails: the process is replaced and the rest
of its chunk is queued again. A thread feeds each worker, so the pool is independent of event loops.
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
"""Beginning of ``Score.error`` if a call ended its process."""
ASYNC_GRACE = 1.0
"""Seconds beyond the limit that a worker gets to cancel its asynchronous calls."""


_ROOT = str(Path(__file__).resolve().parents[2])
# the worker must import this copy of the package, and other modules like any program
_PROGRAM = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); import hone; sys.path.remove({_ROOT!r}); "
    "from hone.rewards.worker import main; main()"
)

logger = logging.getLogger("hone.rewards")


@dataclass
class Outcome:
    """Score of a call, with the traceback if it raised, and all scores of a batch call."""

    score: Score
    traceback: str | None = None
    batch: list[Score] | None = None


@dataclass
class Job:
    """Batch of calls.

    Attributes:
        outcomes: outcome of each call; None if the job was cancelled before.
        max_failures: cancel the job when more calls than this have failed.
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
    single: bool = False


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    connection: Connection
    is_async: bool

    def kill(self) -> int:
        """Kill the process and its children; return the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        activity.forget(self.popen.pid)
        self.connection.close()
        return self.popen.wait()


class WorkerPool:
    """Pool of processes that call one target.

    Args:
        target: target to call.
        num_workers: number of processes.

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
            self._tasks.extend(task for task in tasks if not _is_over(job))
            self._wake.notify_all()
        return job

    def drop(self, job: Job) -> None:
        """Remove the queued calls of a job."""
        with self._wake:
            self._tasks = deque(task for task in self._tasks if task.job is not job)

    def close(self) -> None:
        """End all workers; running jobs are cancelled."""
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
        """Return the next chunk, smaller near the queue's end so that workers finish together; empty on closing."""
        with self._wake:
            while not self._closed:
                while self._tasks and _is_over(self._tasks[0].job):
                    self._tasks.popleft()
                if self._tasks:
                    break
                self._wake.wait()
            if self._closed:
                return []
            if self._tasks[0].single:
                return [self._tasks.popleft()]
            size = max(1, min(MAX_CHUNK, len(self._tasks) // (2 * len(self._threads))))
            chunk: list[_Task] = []
            while self._tasks and len(chunk) < size and not self._tasks[0].single:
                chunk.append(self._tasks.popleft())
            return chunk

    def _run(self, process: _Process, tasks: list[_Task]) -> _Process | None:
        """Run a chunk; return None if the process had to be killed."""
        waiting = dict(enumerate(tasks))
        limit = self.target.timeout + (ASYNC_GRACE if process.is_async else 0.0)
        try:
            process.connection.send([(number, task.payload) for number, task in waiting.items()])
            while waiting:
                if not self._wait(process.connection, limit):
                    process.kill()
                    self._blame(waiting, process, f"{TIMEOUT}: no answer within {self.target.timeout:g} s")
                    return None
                number, result, trace = process.connection.recv()
                task = waiting.pop(number)
                outcome = Outcome(result[0], trace, result) if isinstance(result, list) else Outcome(result, trace)
                self._settle(task.job, task.index, outcome)
        except (EOFError, OSError):
            code = process.kill()
            self._blame(waiting, process, f"{ENDED} (exit code {code})")
            return None
        return process

    def _wait(self, connection: Connection, limit: float) -> bool:
        """Wait for a message; return False after ``limit`` seconds or once the pool closes."""
        deadline = time.monotonic() + limit
        while (left := deadline - time.monotonic()) > 0 and not self._closed:
            if connection.poll(min(left, 0.25)):
                return True
        return connection.poll(0)

    def _blame(self, waiting: dict[int, _Task], process: _Process, error: str) -> None:
        """Fail the running call and queue the others again at the front.

        Synchronous calls run in order: the first one without a result was running. Any of several asynchronous calls may have
        blocked the process, so each of them is retried in a separate process.
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
            _Task(task.job, task.index, task.payload, process.is_async) for task in tasks if not _is_over(task.job)
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
            finished = (job.missing == 0 or _is_over(job)) and not job.done.done()
        if finished:
            self.drop(job)
            with contextlib.suppress(InvalidStateError):
                job.done.set_result(job.outcomes)

    def _fail(self, tasks: list[_Task], error: RewardError) -> None:
        for task in tasks:
            self.drop(task.job)
            if not task.job.done.done():
                task.job.done.set_exception(error)


def _is_over(job: Job) -> bool:
    return job.failures > job.max_failures or job.done.done()


def _start(target: Target) -> _Process:
    """Start a worker and wait until it has loaded the target."""
    parent_end, worker_end = Pipe()
    folder = activity.folder()
    popen = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(worker_end.fileno()), *([str(folder)] if folder else [])],
        pass_fds=[worker_end.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # output of a reward function goes to standard error; standard output is the command's
        env={"OMP_NUM_THREADS": "1", **os.environ},
        start_new_session=True,  # the trainer handles an interrupt at the terminal
    )
    worker_end.close()
    process = _Process(popen, parent_end, is_async=False)  # pyright: ignore[reportArgumentType]
    try:
        parent_end.send(target)
        answer = parent_end.recv() if parent_end.poll(START_TIMEOUT) else None
    except (EOFError, OSError):
        code = process.kill()
        raise RewardError(
            f"the worker process of {_shown(target)} ended while loading it (exit code {code})",
            fix="see its output above; importing the file must not exit or crash the process",
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
