"""Pool of worker processes with a time limit for every call.

Calls are sent in chunks, so that a cheap function has little overhead. Results return one by one, so the pool always knows which
call is running and since when. A thread feeds each worker, so the pool is independent of event loops.

    the running call times out, needs too much memory, or ends its process    that call fails; the rest of its chunk is queued again
    the process fails otherwise: foreign bytes on its channel, killed          the call is tried again in a new process; after
    from outside                                                               MAX_ATTEMPTS the job ends with a ProcessError

In both cases the process is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from typing import Any

from hone.errors import ProcessError
from hone.insight import activity
from hone.rewards.outcome import failed
from hone.rewards.process import CallFailed, PoolClosed, WorkerFailed, WorkerLimits, WorkerProcess
from hone.rewards.score import Score
from hone.rewards.target import Outcome, Target

MAX_CHUNK = 64
MAX_ATTEMPTS = 3  # processes in which a call is tried that fail for another reason than the call
_END_SECONDS = 10.0

logger = logging.getLogger("hone.rewards")


@dataclass
class Job:
    """Batch of calls."""

    outcomes: list[Outcome | None]  # outcome of each call; None if the job was cancelled before
    max_failures: int  # cancel the job when more calls than this have failed
    missing: int
    failures: int = 0
    done: Future[list[Outcome | None]] = field(default_factory=Future)  # resolves to ``outcomes``


@dataclass(frozen=True)
class _Task:
    job: Job
    index: int
    payload: bytes
    single: bool = False
    attempts: int = 0


class WorkerPool:
    """Pool of processes that call one target.

    ``is_async``: True if the target is asynchronous.

    Raises RewardError: the target cannot be loaded.
    """

    def __init__(self, target: Target, num_workers: int, limits: WorkerLimits | None = None) -> None:
        self.target, self.limits = target, limits or WorkerLimits()
        self._tasks: deque[_Task] = deque()
        self._wake = threading.Condition()
        self._closed = False
        first = self._start(0)  # raises here, before anything is generated
        self.is_async = first.is_async
        self._threads = [
            threading.Thread(target=self._serve, args=(number, first if number == 0 else None), daemon=True)
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
            thread.join(_END_SECONDS)

    # threads ---------------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> WorkerProcess:
        return WorkerProcess(self.target, number, self.limits, lambda: self._closed)

    def _serve(self, number: int, process: WorkerProcess | None) -> None:
        """Run chunks until the pool closes; an error ends the jobs of its chunk, never this thread."""
        while tasks := self._take():
            try:
                if process is not None and not process.is_idle:
                    logger.warning("%s ended or sent a message without a call; it is replaced", process.name)
                    process.kill()
                    process = None
                if process is not None and process.has_grown:
                    logger.warning("%s holds more than reward.memory_mb; it is replaced", process.name)
                    process.kill()
                    process = None
                process = process or self._start(number)
                if not self._run(process, tasks):
                    process.kill()
                    process = None
            except PoolClosed:
                self._cancel(tasks)
            except Exception as error:  # noqa: BLE001 - a caller that waits for the jobs raises it
                self._fail(tasks, error)
                if process is not None:
                    process.kill()
                    process = None
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

    def _run(self, process: WorkerProcess, tasks: list[_Task]) -> bool:
        """Run a chunk; return False if the process can no longer be used."""
        waiting = dict(enumerate(tasks))
        try:
            process.send([task.payload for task in tasks])
            while waiting:
                number, outcome = process.result()
                task = waiting.pop(number, None)
                if task is None:
                    raise WorkerFailed(f"{process.name} answered call {number}, which does not wait for an answer")
                self._settle(task.job, task.index, outcome)
        except CallFailed as failure:
            self._blame(list(waiting.values()), process, failed(failure.error, failure.cause))
            return False
        except WorkerFailed as failure:
            self._try_again(list(waiting.values()), process, str(failure))
            return False
        return True

    def _blame(self, tasks: list[_Task], process: WorkerProcess, score: Score) -> None:
        """Fail the running call and queue the others again at the front.

        Synchronous calls run in order: the first one without a result was running. Any of several asynchronous calls may have
        blocked the process, so each of them is retried in a separate process.
        """
        if not process.is_async or len(tasks) == 1:
            culprit = tasks.pop(0)
            self._settle(culprit.job, culprit.index, Outcome(score))
        self._queue_again([replace(task, single=process.is_async) for task in tasks])

    def _try_again(self, tasks: list[_Task], process: WorkerProcess, problem: str) -> None:
        """Queue the calls of a failed process again, or end a job whose call has lost too many processes."""
        running = len(tasks) if process.is_async else 1
        tried = [replace(task, single=True, attempts=task.attempts + 1) for task in tasks[:running]]
        activity.tick()
        logger.warning("%s; it is replaced, and %d calls are tried again", problem, len(tasks))
        lost = [task for task in tried if task.attempts >= MAX_ATTEMPTS]
        if lost:
            error = ProcessError(
                f"{problem}; it is the last of {MAX_ATTEMPTS} processes in which a call of {self.target.shown} was tried",
                why="the response has no score, and a wrong 0 would train the policy",
                fix="a reward function must not write to descriptors that it did not open, nor close them; if memory is "
                "out, use fewer workers (reward.num_workers) or a limit (reward.memory_mb)",
                where="reward",
            )
            self._fail(lost, error)
        again = [task for task in tried if task.attempts < MAX_ATTEMPTS]
        self._queue_again([*again, *tasks[running:]])

    def _queue_again(self, tasks: list[_Task]) -> None:
        with self._wake:
            if self._closed:
                self._cancel(tasks)
                return
            self._tasks.extendleft(task for task in reversed(tasks) if not _is_over(task.job))
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

    def _fail(self, tasks: list[_Task], error: Exception) -> None:
        for task in tasks:
            self.drop(task.job)
            with contextlib.suppress(InvalidStateError):
                task.job.done.set_exception(error)

    def _cancel(self, tasks: list[_Task]) -> None:
        for task in tasks:
            task.job.done.cancel()


def _is_over(job: Job) -> bool:
    return job.failures > job.max_failures or job.done.done()
