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
import math
import os
import pickle
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from hone.errors import ProcessError, RewardError
from hone.insight import activity
from hone.insight.environment import usable_memory
from hone.insight.redaction import redact_text
from hone.rewards.frames import MAX_ANSWER, NONCE_BYTES, Channel, ChannelError, socket_pair
from hone.rewards.score import Cause, Score
from hone.rewards.worker import BROKEN, LoadFailure, Outcome, Ready, Target, decode_result, decode_start, failed

WINDOW = 60.0  # seconds after which a worker may print as much again
_CHUNK = 1 << 16
_OUTPUT_POLL_SECONDS = 0.2
_OUTPUT_END_SECONDS = 2.0


class CapturedOutput:
    """Pipe that takes the standard output and error of a worker, and the thread that shows it.

    What is over the limit is read, counted and dropped; the count is logged after the window and at the worker's end.
    ``limit_kb``: KiB shown a minute; None shows everything. ``cut``: bytes that were not shown, in all.
    """

    def __init__(self, name: str, limit_kb: int | None) -> None:
        self.name, self.limit_kb, self.cut = name, limit_kb, 0
        self._source, self.descriptor = os.pipe()
        os.set_blocking(self._source, False)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._show, name=f"output of {name}", daemon=True)
        self._reported, self._ends = 0, math.inf
        self._begin_window()

    @contextlib.contextmanager
    def handed_over(self) -> Iterator[None]:
        """Start the worker in the body, which inherits :attr:`descriptor`; its output is shown from then on."""
        try:
            yield
        except BaseException:
            os.close(self._source)
            raise
        else:
            self._thread.start()
        finally:
            os.close(self.descriptor)

    def close(self) -> None:
        """Show what is left in the pipe, and stop; a process that still holds the other end is not waited for."""
        self._ends = time.monotonic() + _OUTPUT_END_SECONDS / 2
        self._closing.set()
        self._thread.join(_OUTPUT_END_SECONDS)

    def _show(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        while True:
            closing = self._closing.is_set()  # before the read: what was printed until then is shown
            data = self._read() if poll.poll(0 if closing else _OUTPUT_POLL_SECONDS * 1000) else None
            if data:
                self._forward(data)
            if data == b"" or (closing and (data is None or time.monotonic() > self._ends)):
                break
            if time.monotonic() > self._window_ends:
                self._report()
                self._begin_window()
        self._report()
        os.close(self._source)

    def _read(self) -> bytes | None:
        try:
            return os.read(self._source, _CHUNK)
        except BlockingIOError:
            return None

    def _forward(self, data: bytes) -> None:
        shown = data if self._left is None else data[: self._left]
        self.cut += len(data) - len(shown)
        if self._left is not None:
            self._left -= len(shown)
        while shown:
            with contextlib.suppress(InterruptedError):
                try:
                    shown = shown[os.write(2, shown) :]
                except OSError:  # standard error is closed
                    return

    def _begin_window(self) -> None:
        self._left = None if self.limit_kb is None else self.limit_kb * 1024
        self._window_ends = time.monotonic() + WINDOW

    def _report(self) -> None:
        fresh, self._reported = self.cut - self._reported, self.cut
        if fresh:
            logger.warning(
                "%s printed %d bytes over the limit of %s KiB a minute, which are not shown (%d in all); "
                "reward.max_output_kb changes the limit",
                self.name,
                fresh,
                self.limit_kb,
                self.cut,
            )


START_TIMEOUT = 180.0  # seconds a worker may take to import the reward function's file
ASYNC_GRACE = 1.0  # seconds beyond the limit that a worker gets to cancel its asynchronous calls
_POLL_SECONDS = 0.1
_CHILDREN_SECONDS = 1.0
_STOP_SECONDS = 5.0

_ROOT = str(Path(__file__).resolve().parents[2])
# the worker must import this copy of the package, and other modules like any program
_PROGRAM = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); import hone; sys.path.remove({_ROOT!r}); "
    "from hone.rewards.worker import main; main()"
)


class CallFailed(Exception):
    """Error of the running call, which its function caused: a timeout, too much memory, the end of its process."""

    def __init__(self, cause: Cause, error: str) -> None:
        super().__init__(error)
        self.cause, self.error = cause, error


class WorkerFailed(Exception):
    """Error of the process itself, which says nothing about the running call."""


class PoolClosed(Exception):
    """The pool was closed during a wait."""


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a worker process."""

    # resident memory of the process and its children in MiB; None means half of the machine's or container's
    # memory
    memory_mb: int | None = None
    output_kb: int | None = None  # KiB of output shown a minute; None shows everything

    @property
    def memory_bytes(self) -> int:
        return usable_memory() // 2 if self.memory_mb is None else self.memory_mb * 2**20


class WorkerProcess:
    """Started worker process that has loaded its target.

    Args:
        closed: function that returns True once the pool closes.

    Raises:
        RewardError: the target cannot be loaded.
        PoolClosed: the pool was closed before it was loaded.
    """

    def __init__(self, target: Target, number: int, limits: WorkerLimits, closed: Callable[[], bool]) -> None:
        self.target, self.limits, self.is_async = target, limits, False
        self._closed = closed
        self._memory_bytes, self._next_measure, self._child_bytes = limits.memory_bytes, 0.0, 0
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection, remote = socket_pair()
        self._channel = Channel(connection, nonce, max_body=MAX_ANSWER)
        output = CapturedOutput(f"reward worker {number}", limits.output_kb)
        folder = activity.folder()
        with remote, output.handed_over():
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(remote.fileno()), nonce.hex(), *([str(folder)] if folder else [])],
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output.descriptor,  # shown on standard error; standard output is the command's
                stderr=output.descriptor,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # the trainer handles an interrupt at the terminal
            )
        self.name = output.name = f"reward worker {number} (pid {self._popen.pid})"
        self._output = output
        try:
            self._load()
        except BaseException:
            self.kill()
            raise
        self._loaded_bytes = self._held_bytes()

    def send(self, payloads: Sequence[bytes]) -> None:
        """Send the pickled arguments of calls, which are numbered from 0.

        Raises WorkerFailed: the process does not read them.
        """
        try:
            self._channel.send(pickle.dumps(list(payloads)), self._limit)
        except TimeoutError:
            raise WorkerFailed(f"{self.name} does not read its calls") from None
        except OSError:
            raise WorkerFailed(f"{self.name} ended while it waited for calls") from None

    def result(self) -> tuple[int, Outcome]:
        """Wait for the next result; return the number of its call and the outcome.

        Raises:
            CallFailed: the call took too long or too much memory, or ended the process.
            WorkerFailed: the process failed otherwise.
            PoolClosed: the pool was closed.
        """
        try:
            body = self._buffered() or self._receive(self._limit, during_call=True)
        except EOFError:
            code = self._exit_code()
            if code is None or code == BROKEN:
                raise WorkerFailed(
                    f"the channel of {self.name} was closed, or it broke; see its output above"
                ) from None
            if code == -signal.SIGKILL:
                raise WorkerFailed(f"{self.name} was killed from outside, perhaps because memory was out") from None
            raise CallFailed(Cause.CRASH, f"the worker process ended (exit code {code})") from None
        if body is None:
            raise CallFailed(Cause.TIMEOUT, f"timeout: no answer within {self.target.timeout:g} s")
        try:
            return decode_result(body)
        except ValueError as error:
            raise WorkerFailed(f"{self.name}: {error}") from error

    @property
    def is_idle(self) -> bool:
        """True if the process lives and has sent nothing that it was not asked for."""
        return self._popen.poll() is None and not self._channel.is_readable()

    @property
    def has_grown(self) -> bool:
        """True if it holds more than its limit, and did not when it was loaded: short calls end before they are measured."""
        return self._held_bytes() > self._memory_bytes > self._loaded_bytes

    def kill(self) -> None:
        """Kill the process with the children of its session, and show the rest of its output."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.kill()
        activity.forget(self._popen.pid)
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process in an uninterruptible system call
            self._popen.wait(_STOP_SECONDS)
        self._output.close()

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> float:
        return self.target.timeout + (ASYNC_GRACE if self.is_async else 0.0)

    def _load(self) -> None:
        try:
            self._channel.send(pickle.dumps(self.target), START_TIMEOUT)
            body = self._receive(START_TIMEOUT, during_call=False)
            answer = None if body is None else decode_start(body)
        except (EOFError, OSError):
            code = self._exit_code()
            how = "closed its channel" if code is None else f"ended (exit code {code})"
            raise RewardError(
                f"the worker process of {self.target.shown} {how} while loading it",
                fix="see its output above; importing the file must not exit or crash the process",
            ) from None
        except (WorkerFailed, ValueError) as error:
            raise RewardError(
                f"the worker process of {self.target.shown} failed while loading it: {error}", fix=_DESCRIPTORS
            ) from error
        if answer is None:
            raise RewardError(
                f"loading {self.target.shown} took more than {START_TIMEOUT:g} s",
                fix="do less when the file is imported",
            )
        if isinstance(answer, LoadFailure):
            if answer.traceback:
                logger.error("%s", redact_text(f"{answer.what}\n{answer.traceback}"))
            raise RewardError(
                answer.what,
                why="without it no response can be scored",
                fix=answer.fix,
                where="reward.custom_reward_function",
            )
        assert isinstance(answer, Ready)
        self.is_async = answer.is_async

    def _buffered(self) -> bytes | None:
        try:
            return self._channel.buffered()
        except ChannelError as error:
            raise self._foreign(error) from error

    def _foreign(self, error: ChannelError) -> WorkerFailed:
        return WorkerFailed(f"{self.name} cannot be trusted: {error}")

    def _receive(self, limit: float, *, during_call: bool) -> bytes | None:
        """Return the next message, or None after ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while (left := deadline - time.monotonic()) > 0:
            if self._closed():
                raise PoolClosed
            ended = self._popen.poll() is not None  # before the read: its last message is still there
            try:
                body = self._channel.receive(0.0 if ended else min(left, _POLL_SECONDS))
            except ChannelError as error:
                raise self._foreign(error) from error
            if body is not None:
                return body
            if ended:  # a copy of the process holds the channel open
                raise EOFError
            if during_call:
                self._check_memory()
        return None

    def _check_memory(self) -> None:
        """Compare the memory of the process and its children with the limit.

        Listing all processes of the machine takes milliseconds, so the children are measured once a second.
        """
        now = time.monotonic()
        if now >= self._next_measure:
            self._next_measure, self._child_bytes = now + _CHILDREN_SECONDS, _child_bytes(self._popen.pid)
        used = self._held_bytes()
        if used > self._memory_bytes:
            raise CallFailed(
                Cause.MEMORY,
                f"memory: the call and its process hold {used / 2**20:.0f} MiB, more than the "
                f"{self._memory_bytes / 2**20:.0f} MiB of reward.memory_mb",
            )

    def _held_bytes(self) -> int:
        return _resident_bytes(self._popen.pid) + self._child_bytes

    def _exit_code(self) -> int | None:
        try:
            return self._popen.wait(1.0)
        except subprocess.TimeoutExpired:
            return None


_DESCRIPTORS = "a reward function must not write to file descriptors that it did not open"


def _resident_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _child_bytes(pid: int) -> int:
    """Return the memory of a process's children that they do not share with it or with one another."""
    used = 0
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                used += child.memory_full_info().uss
    return used


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
            job.failures += outcome.score.failed
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
