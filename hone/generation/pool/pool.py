"""The pool as an engine: supervision of its replicas, a queue, the choice of a replica, and retries.

::

    generate --> queue --> available replica with the fewest outstanding tokens --> completion
                   ^          |   (an episode returns to the replica of its last turn)
                   +----------+ lost or timed out: to the front of the queue, for another replica

The tokens of a request depend only on its seed, so a retry gives the same tokens. A completion is delivered once, because a
request is in at most one replica at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from hone.config.engines import ServerPoolConfig
from hone.data.types import StopReason
from hone.errors import GenerationError, HoneError, ProcessError
from hone.generation.pool.replica import Concurrency, Replica, ReplicaState
from hone.generation.protocol import (
    Completion,
    Engine,
    EngineDescription,
    GenerationRequest,
    SamplingParams,
    incomplete_weights,
)
from hone.generation.remote.delta import Differences
from hone.generation.remote.transports import buckets

Named = tuple[str, Tensor]


class PublishedWeights:
    """A copy of the last complete version, in the memory of this process. The next version reuses its buffers.

    Attributes:
        dtype: of the stored floating-point weights, the same as the engines'; None stores each in its dtype.
        version: of the weights; 0 for those that engines start with.
        whole: whether all weights of a version have arrived.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.version, self.whole = 0, True
        self._kept: dict[str, Tensor] = {}
        self._arrived: set[str] = set()

    def begin(self) -> None:
        """Start a new version; drop an incomplete one."""
        if not self.whole:
            self._kept = {}
        self.whole, self._arrived = False, set()

    def add(self, tensors: Sequence[Named]) -> None:
        with torch.no_grad():
            for name, tensor in tensors:
                stored = self._kept.get(name)
                dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
                if stored is None or stored.shape != tensor.shape or stored.dtype != dtype:
                    stored = self._kept[name] = torch.empty_like(tensor, device="cpu", dtype=dtype)
                stored.copy_(tensor)
                self._arrived.add(name)

    def differences(self) -> Differences:
        """Return the differences to the stored version, valid until the next :meth:`add`; all weights without such a version."""
        return Differences(self._kept.get)

    def finish(self, version: int) -> None:
        """Complete the version; without new weights the stored ones get its number."""
        if self._arrived:
            self._kept = {name: self._kept[name] for name in self._kept if name in self._arrived}
        self.version, self.whole = version, True

    def tensors(self) -> list[Named]:
        """Return all weights; none while engines have the weights that they started with."""
        return list(self._kept.items())


log = logging.getLogger("hone.generation.pool")
_PAUSE = 0.2
Started = tuple[Engine, EngineDescription]
T = TypeVar("T")


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Return the result of ``work`` within a time limit.

    Unlike with ``asyncio.timeout``, a result that arrived while the event loop was busy, for example with a policy update,
    does not count as late.

    Raises:
        TimeoutError: there is no result after ``seconds``.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


class Supervisor:
    """Starts, probes, updates and restarts the replicas of a pool.

    ::

        STARTING --> (has the latest weights: one token is sampled) --> SERVING <--> DRAINING
           ^  |                                                            |
           |  +--> FENCED: waits for weights --> (the same) ----------------+
           +------ lost: process died or probe not answered ---------------+       STARTING --> LOST after several attempts

    :class:`~hone.generation.pool.pool.Resizer` adds replicas in STARTING, and ends others in CLOSING.

    Args:
        on_change: called when a replica starts to serve, or is given up.
        delta: whether engines accept changes since the previous version (:class:`~hone.generation.remote.ServedEngine`).
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        limits: ServerPoolConfig,
        start: Callable[[int], Engine],
        *,
        on_change: Callable[[], None],
        delta: bool,
    ) -> None:
        self._replicas, self._limits, self._start = replicas, limits, start
        self._on_change, self._delta = on_change, delta
        self.weights = PublishedWeights()  # the latest weights
        self._starting: dict[Replica, Future[Started]] = {}
        self._restarts: dict[Replica, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._taking: dict[Replica, Engine] | None = None
        self._taken: dict[Replica, Engine] = {}
        self._closed = False

    @property
    def publishing(self) -> bool:
        """True while more weights of a version follow."""
        return self._taking is not None

    def start_all(self) -> None:
        """Start all replicas at once."""
        starting = [replica.threads.submit(self._begin, replica.index) for replica in self._replicas]
        problem: BaseException | None = None
        for replica, future in zip(self._replicas, starting, strict=True):
            try:
                replica.attach(*future.result())
                replica.state = ReplicaState.SERVING
            except BaseException as error:  # noqa: BLE001 - raised after the other replicas have been closed
                problem = error
        if problem is not None:
            self.close()
            raise problem
        dtypes = {replica.description.dtype for replica in self._replicas if replica.description is not None}
        self.weights.dtype = getattr(torch, dtypes.pop()) if len(dtypes) == 1 else None

    def attend(self) -> None:
        loop = asyncio.get_running_loop()
        if self._watch is None or self._watch.done() or self._watch.get_loop() is not loop:
            self._watch = loop.create_task(self._probe_periodically())

    def restart(self, replica: Replica) -> None:
        """Give a replica an engine with the latest weights, unless that is under way."""
        if not self.is_restarting(replica):
            self._restarts[replica] = self.spawn(self._restart(replica))

    def is_restarting(self, replica: Replica) -> bool:
        task = self._restarts.get(replica)
        return task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop()

    def forget(self, replica: Replica) -> None:
        """Release what is kept of a replica that has left the pool."""
        self._restarts.pop(replica, None)
        replica.threads.shutdown(wait=False)
        self._on_change()

    def restart_lost(self, replica: Replica, engine: Engine, error: BaseException) -> None:
        """Restart a replica whose engine is lost. Its requests return to the queue by themselves."""
        if self._closed or replica.engine is not engine or replica.state in (ReplicaState.STARTING, ReplicaState.LOST):
            return  # the engine was already replaced, or will be
        replica.state, replica.problem = ReplicaState.STARTING, _problem(error)
        log.warning("replica %d is lost and restarts: %s", replica.index, replica.problem)
        self.restart(replica)

    async def drain(self, replica: Replica) -> None:
        """Send a replica no more requests, and wait until it has finished its own."""
        if replica.state is ReplicaState.SERVING:
            replica.state = ReplicaState.DRAINING
        while replica.under_way:
            await asyncio.sleep(_PAUSE / 10)

    # weights ---------------------------------------------------------------------------------------------------------

    async def publish(
        self, weights: Iterable[tuple[str, Tensor]], version: int, *, last: bool, bucket_bytes: int
    ) -> None:
        """Send weights to all replicas; see :meth:`EnginePool.load_weights`."""
        if self._taking is None:
            self._taking = self._fence()
            self.weights.begin()
        try:
            for bucket, ends in buckets(weights, bucket_bytes):
                if self._delta:
                    await self._send(
                        self._taking, bucket, version, last=ends and last, since=self.weights.differences()
                    )
                    await asyncio.to_thread(self.weights.add, bucket)
                else:
                    sending = self._send(self._taking, bucket, version, last=ends and last)
                    await asyncio.gather(sending, asyncio.to_thread(self.weights.add, bucket))  # while engines load
        except BaseException:
            self._taking = None  # the replicas stay fenced until the next weight sync, which starts again
            raise
        if last:
            self.weights.finish(version)
            self._taken, self._taking = self._taking, None
            for replica in self._replicas:
                if replica.state is ReplicaState.FENCED and self._taken.get(replica) is not replica.engine:
                    replica.state = ReplicaState.STARTING
                    self.restart(replica)

    async def admit(self) -> None:
        """Let the replicas that have loaded the latest version serve."""
        taken, self._taken = self._taken, {}
        await asyncio.gather(*(self._admit_or_lose(replica, engine) for replica, engine in taken.items()))

    def _fence(self) -> dict[Replica, Engine]:
        """Send replicas no requests until they have new weights; return those that can load them."""
        taking = {}
        for replica in self._replicas:
            if replica.engine is not None and replica.state not in (ReplicaState.STARTING, ReplicaState.LOST):
                replica.state = ReplicaState.FENCED
                taking[replica] = replica.engine
        return taking

    async def _send(
        self, taking: dict[Replica, Engine], bucket: Sequence[tuple[str, Tensor]], version: int, **options: Any
    ) -> None:
        async def one(replica: Replica, engine: Engine) -> None:
            try:
                await engine.load_weights(bucket, version, **options)
            except ProcessError as error:
                self.restart_lost(replica, engine, error)

        await asyncio.gather(*(one(replica, engine) for replica, engine in taking.items() if replica.engine is engine))

    async def _admit_or_lose(self, replica: Replica, engine: Engine) -> None:
        if replica.engine is not engine or replica.state is not ReplicaState.FENCED:
            return
        try:
            await self._admit(replica, engine)
        except (ProcessError, TimeoutError) as error:
            self.restart_lost(replica, engine, error)

    async def _admit(self, replica: Replica, engine: Engine) -> bool:
        """Let a replica serve, if it samples a token with the latest weights; return False if newer ones came meanwhile."""
        version = self.weights.version
        request = GenerationRequest("admission", [0], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))

        async def sampled() -> list[tuple[int, int]]:
            return [completion.weight_versions async for completion in engine.generate([request])]

        (versions,) = await within(self._limits.health_check_timeout, sampled())
        if versions != (version, version):
            raise GenerationError(
                f"replica {replica.index} samples from weights {versions}, but the latest version is {version}",
                why="it would sample from a different policy than the trained one",
                fix="see the engine's log",
            )
        if replica.engine is not engine or self._taking is not None or version != self.weights.version:
            return False
        replica.state = ReplicaState.SERVING
        self._on_change()
        return True

    # life ------------------------------------------------------------------------------------------------------------

    async def _restart(self, replica: Replica) -> None:
        """Give a replica a running engine with the latest weights, and admit it."""
        for attempt in range(self._limits.start_attempts):
            if replica.leaving:
                return
            try:
                engine = (
                    replica.engine
                    if attempt == 0 and self._only_lacks_weights(replica)
                    else await self._new_engine(replica)
                )
                if engine is None or self._closed:
                    return
                await self._send_latest(replica, engine)
                return
            except (HoneError, OSError) as error:  # a TimeoutError is an OSError
                replica.problem = _problem(error)
                log.warning("replica %d cannot be started: %s", replica.index, replica.problem)
                await asyncio.sleep(_PAUSE * 2**attempt)
        replica.state = ReplicaState.LOST
        await self.end(replica)
        self._on_change()

    @staticmethod
    def _only_lacks_weights(replica: Replica) -> bool:
        return replica.engine is not None and not replica.problem

    async def _new_engine(self, replica: Replica) -> Engine | None:
        await self.end(replica)
        if replica not in self._starting:
            self._starting[replica] = replica.threads.submit(self._begin, replica.index)
        try:
            engine, description = await asyncio.shield(asyncio.wrap_future(self._starting[replica]))
        except asyncio.CancelledError:
            raise  # this loop ends; the next loop or :meth:`close` handles the started engine
        except BaseException:
            del self._starting[replica]
            raise
        del self._starting[replica]
        if self._closed:
            engine.close()
            return None
        replica.attach(engine, description)
        replica.problem = ""
        return engine

    def _begin(self, index: int) -> Started:
        engine = self._start(index)
        try:
            return engine, engine.describe()
        except BaseException:
            engine.close()
            raise

    async def end(self, replica: Replica) -> None:
        old, replica.engine = replica.engine, None
        if old is not None:
            await asyncio.shield(asyncio.wrap_future(replica.threads.submit(old.close)))

    async def _send_latest(self, replica: Replica, engine: Engine) -> None:
        """Send the latest weights to a new engine, again if newer ones arrive meanwhile."""
        weights = self.weights
        while self._taking is None and weights.whole:
            version = weights.version
            if version:
                await engine.load_weights(weights.tensors(), version)
            is_latest = self._taking is None and version == weights.version
            if is_latest and await self._admit(replica, engine):
                return
        replica.state = ReplicaState.FENCED  # it gets its weights at the end of this weight sync, or with the next one

    async def _probe_periodically(self) -> None:
        while not self._closed:
            await asyncio.sleep(self._limits.health_check_period)
            await self.probe()

    async def probe(self) -> None:
        """Get the counters of every replica; a replica without an answer restarts."""
        serving = [r for r in self._replicas if r.state in (ReplicaState.SERVING, ReplicaState.DRAINING)]
        await asyncio.gather(*(self._probe(replica) for replica in serving))

    async def _probe(self, replica: Replica) -> None:
        engine, seconds = replica.engine, self._limits.health_check_timeout
        if engine is None:
            return
        try:
            description = await within(
                seconds, asyncio.get_running_loop().run_in_executor(replica.threads, engine.describe)
            )
        except TimeoutError:
            self.restart_lost(
                replica, engine, ProcessError(f"replica {replica.index} did not answer within {seconds:g} s")
            )
        except ProcessError as error:
            self.restart_lost(replica, engine, error)
        else:
            if replica.engine is engine:
                replica.description = description
                replica.concurrency.note_preemptions(int(description.stats.get("preemptions", 0)))

    def close(self) -> None:
        self._closed = True
        for task in (self._watch, *self._tasks):
            if task is not None:
                with contextlib.suppress(RuntimeError):  # its event loop is closed already
                    task.cancel()
        for starting in self._starting.values():
            starting.cancel()
            starting.add_done_callback(_close_if_started)
        for replica in self._replicas:
            engine, replica.engine, replica.state = replica.engine, None, ReplicaState.LOST
            if engine is not None:
                engine.close()
        for replica in self._replicas:
            replica.threads.shutdown(wait=True)  # waits for engines that start or end

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task until :meth:`close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _problem(error: BaseException) -> str:
    return error.what if isinstance(error, HoneError) else str(error) or "it did not answer"


def _close_if_started(starting: Future[Started]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result()[0].close()


PERIOD = 0.02
"""Seconds between two looks at replicas that leave."""


class Resizer:
    """Adds replicas to a pool, and removes those with the highest numbers.

    A new replica starts like one that restarts: in a thread, and it serves once it has the latest weights. A replica that
    leaves finishes its requests, without new ones, and takes part in weight syncs until then. It leaves only while one that
    stays can serve, so that replicas which do not start never stop the pool.
    """

    def __init__(self, replicas: list[Replica], supervisor: Supervisor, new: Callable[[int], Replica]) -> None:
        self._replicas, self._supervisor, self._new = replicas, supervisor, new
        self.count = len(replicas)  # wanted number of replicas
        self._removing: asyncio.Task[None] | None = None

    def resize(self, count: int) -> None:
        """Have ``count`` replicas from now on; those that were given up are started again."""
        self.count = count
        for replica in self._replicas[:count]:
            if replica.state is ReplicaState.LOST:
                replica.state = ReplicaState.STARTING
        self._replicas += [self._new(index) for index in range(len(self._replicas), count)]
        self.attend()

    def attend(self) -> None:
        """Start and remove replicas on the current event loop."""
        self._mark()
        loop = asyncio.get_running_loop()
        ended = self._removing is None or self._removing.done() or self._removing.get_loop() is not loop
        if ended and len(self._replicas) > self.count:
            self._removing = self._supervisor.spawn(self._remove_surplus())

    def _mark(self) -> None:
        """Decide which replicas leave; start those that stay and have no engine."""
        can_serve = (ReplicaState.SERVING, ReplicaState.FENCED)
        replaced = any(replica.state in can_serve for replica in self._replicas[: self.count])
        for replica in self._replicas:
            replica.leaving = replaced and replica.index >= self.count
            if replica.state is ReplicaState.STARTING and not replica.leaving:
                self._supervisor.restart(replica)

    async def _remove_surplus(self) -> None:
        while len(self._replicas) > self.count:
            self._mark()
            last = self._replicas[-1]
            is_busy = last.under_way or last.state is ReplicaState.FENCED or self._supervisor.is_restarting(last)
            if last.leaving and not is_busy:
                last.state = ReplicaState.CLOSING
                await self._supervisor.end(last)
                if len(self._replicas) > self.count and self._replicas[-1] is last:
                    self._supervisor.forget(self._replicas.pop())
                else:  # it was wanted again meanwhile, or others came after it and leave first
                    last.state = ReplicaState.STARTING
                    self._mark()
            else:
                await asyncio.sleep(PERIOD)


MAX_HOMES = 65536
"""Maximum of episodes whose replica is remembered; the oldest are dropped first."""


@dataclass(eq=False)
class PoolRequest:
    """A request in the pool, with its answer queue and number of attempts."""

    number: int
    request: GenerationRequest
    answers: asyncio.Queue[Completion | BaseException]
    since: float
    """Start of waiting (``time.monotonic``)."""
    attempts: int = 0
    slow: set[Replica] = field(default_factory=set)
    """Replicas in which it timed out."""
    task: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> int:
        """Maximum of its tokens: prompt and response."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


class EnginePool:
    """Several engines as one.

    Args:
        start: creates the engine of the replica with this number; called in a thread, again after a loss.
        limits: configuration block ``rollout.server_pool``; None has its defaults.
        concurrency: initial limit of requests per replica; it then follows the engine's cache.
        delta: whether engines accept changes since the previous version
            (:meth:`hone.generation.remote.ServedEngine.load_weights`), which are computed once for all engines.
    """

    def __init__(
        self,
        start: Callable[[int], Engine],
        count: int,
        *,
        limits: ServerPoolConfig | None = None,
        concurrency: int = 64,
        bucket_bytes: int = 512 * 2**20,
        delta: bool = False,
    ) -> None:
        if count < 1:
            raise ValueError(f"a pool of {count} replicas")
        self.limits = replace(limits) if limits is not None else ServerPoolConfig()

        def new_replica(index: int) -> Replica:
            return Replica(index, Concurrency(concurrency))

        self.replicas = [new_replica(index) for index in range(count)]
        self._bucket_bytes, self._paused = bucket_bytes, False
        self._supervisor = Supervisor(self.replicas, self.limits, start, on_change=self.dispatch, delta=delta)
        self._resizer = Resizer(self.replicas, self._supervisor, new_replica)
        self._numbers = itertools.count()
        self._waiting: deque[PoolRequest] = deque()
        self._homes: dict[str, Replica] = {}
        self._queue_has_space = asyncio.Event()
        self._supervisor.start_all()

    @property
    def version(self) -> int:
        """Version of the latest weights."""
        return self._supervisor.weights.version

    @property
    def count(self) -> int:
        return self._resizer.count

    def resize(self, count: int) -> None:
        """Have ``count`` replicas from now on, without a pause.

        New replicas start in threads, and serve once they have the latest weights. Of too many, those with the highest
        numbers finish their requests and end; their episodes continue on others. A replica that cannot start is given up
        (state LOST), and a later call tries it again.
        """
        if count < 1:
            raise ValueError(f"a pool of {count} replicas")
        self._attend()
        self._resizer.resize(count)
        self.dispatch()

    def _attend(self) -> None:
        """Watch, start and remove replicas on the current event loop."""
        self._supervisor.attend()
        self._resizer.attend()

    # requests --------------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        """Serve the requests, yielding each completion as it finishes. Closing the iterator aborts its requests.

        Raises:
            ProcessError: no replica is left.
        """
        self._attend()
        if not self._supervisor.weights.whole and not self._supervisor.publishing:
            raise incomplete_weights(f"after version {self.version}")
        answers: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        now = time.monotonic()
        jobs = [PoolRequest(next(self._numbers), request, answers, now) for request in requests]
        while len(self._waiting) + len(jobs) > self.limits.max_queued_requests and self._waiting:
            self._queue_has_space.clear()
            await self._queue_has_space.wait()
        self._waiting.extend(jobs)
        self.dispatch()
        try:
            for _ in jobs:
                answer = await answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:
            self._drop(jobs)

    def dispatch(self) -> None:
        """Send waiting requests to available replicas, first come, first served."""
        while self._waiting and all(replica.state is ReplicaState.LOST for replica in self.replicas):
            self._waiting.popleft().answers.put_nowait(self._no_replica_error())
        while self._waiting and not self._paused:
            replica = self._choose(self._waiting[0])
            if replica is None:
                break
            job = self._waiting.popleft()
            replica.begin(job.number, job.tokens)
            if job.request.session is not None:
                self._homes.pop(job.request.session, None)
                self._homes[job.request.session] = replica
                if len(self._homes) > MAX_HOMES:
                    del self._homes[next(iter(self._homes))]
            job.task = asyncio.get_running_loop().create_task(self._serve(job, replica))
        if len(self._waiting) < self.limits.max_queued_requests:
            self._queue_has_space.set()

    def _choose(self, job: PoolRequest) -> Replica | None:
        """Return the replica of the episode's last turn if available, else the one with the fewest outstanding tokens."""
        home = self._homes.get(job.request.session) if job.request.session is not None else None
        if home is not None and home.is_available and home not in job.slow:
            return home
        free = [replica for replica in self.replicas if replica.is_available]
        return min(free, key=lambda replica: (replica in job.slow, replica.load, replica.index), default=None)

    async def _serve(self, job: PoolRequest, replica: Replica) -> None:
        job.attempts += 1
        started = time.monotonic()
        answer: Completion | BaseException | None = None
        engine = replica.engine
        assert engine is not None
        try:
            answer = await within(self.limits.request_timeout, self._completion(job.request, engine))
            replica.note(answer, started - job.since, time.monotonic() - started)
        except ProcessError as error:
            self._supervisor.restart_lost(replica, engine, error)
            answer = self._requeue(job, replica, error)
        except TimeoutError:
            job.slow.add(replica)
            slow = GenerationError(
                f"request '{job.request.request_id}' timed out after {self.limits.request_timeout:g} s in a replica, "
                f"{job.attempts} times",
                why="the replicas are overloaded or hang",
                fix=f"actor_rollout_ref.rollout.server_pool.request_timeout={2 * (self.limits.request_timeout or 0):g}, "
                "or a smaller data.max_response_length",
                where="actor_rollout_ref.rollout.server_pool.request_timeout",
            )
            answer = self._requeue(job, replica, slow)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is the caller's answer
            answer = error
        finally:
            replica.end(job.number)
            job.task = None
            if answer is not None:
                job.answers.put_nowait(answer)
            self.dispatch()

    async def _completion(self, request: GenerationRequest, engine: Engine) -> Completion:
        stream = engine.generate([request])
        try:
            return await anext(stream)
        except StopAsyncIteration:
            raise GenerationError(
                f"the engine returned no completion of request '{request.request_id}'", fix="see its log"
            ) from None
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def _requeue(self, job: PoolRequest, replica: Replica, error: BaseException) -> BaseException | None:
        """Put a job back at the front of the queue; return the error after the last attempt."""
        replica.window.retried += 1
        if job.attempts >= self.limits.max_attempts:
            return error
        job.since = time.monotonic()
        self._waiting.appendleft(job)
        return None

    def _drop(self, jobs: Sequence[PoolRequest]) -> None:
        """Drop jobs whose caller is gone or has finished."""
        numbers = {job.number for job in jobs}
        if any(job.number in numbers for job in self._waiting):
            self._waiting = deque(job for job in self._waiting if job.number not in numbers)
        for job in jobs:
            if job.task is not None:
                job.task.cancel()

    def _no_replica_error(self) -> ProcessError:
        problems = "; ".join(f"replica {replica.index}: {replica.problem}" for replica in self.replicas)
        return ProcessError(
            f"all {len(self.replicas)} replicas are lost and cannot be started: {problems}",
            why="no engine can generate",
            fix="see the engines' logs",
        )

    # the rest of the protocol ----------------------------------------------------------------------------------------

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
        """Send new weights to all replicas. A replica that is lost meanwhile gets them after its restart."""
        self._attend()
        await self._supervisor.publish(weights, version, last=last, bucket_bytes=self._bucket_bytes)
        if last and not self._paused:
            await self._supervisor.admit()

    async def pause(self) -> None:
        self._paused = True
        await self._all(lambda engine: engine.pause())

    async def resume(self) -> None:
        """Resume decoding. Replicas that got new weights during the pause are admitted now."""
        await self._all(lambda engine: engine.resume())
        self._paused = False
        await self._supervisor.admit()
        self.dispatch()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        wanted = None if request_ids is None else set(request_ids)
        kept: deque[PoolRequest] = deque()
        for job in self._waiting:
            if wanted is None or job.request.request_id in wanted:
                empty = Completion(job.request.request_id, [], [], [], StopReason.ABORTED, (self.version, self.version))
                job.answers.put_nowait(empty)
            else:
                kept.append(job)
        self._waiting = kept
        await self._all(lambda engine: engine.abort(request_ids))

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await self._all(lambda engine: engine.sleep(keep_weights=keep_weights))

    async def wake(self, *, cache: bool = True) -> None:
        await self._all(lambda engine: engine.wake(cache=cache))

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            self._homes.pop(session, None)
        await self._all(lambda engine: engine.end_sessions(sessions))

    async def drain(self, index: int) -> None:
        """Let a replica finish its requests without new ones, until :meth:`admit`."""
        await self._supervisor.drain(self.replicas[index])

    def admit(self, index: int) -> None:
        """Send requests to a drained replica again."""
        if self.replicas[index].state is ReplicaState.DRAINING:
            self.replicas[index].state = ReplicaState.SERVING
            self.dispatch()

    async def take_metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each replica since the last call; see :meth:`Replica.take_metrics`."""
        await self._supervisor.probe()
        return [replica.take_metrics() for replica in self.replicas]

    def describe(self) -> EngineDescription:
        """Return the properties of the first engine, with a report on each replica."""
        reports: dict[str, Any] = {f"replica_{replica.index}": replica.report() for replica in self.replicas}
        first = next(replica.description for replica in self.replicas if replica.description is not None)
        return EngineDescription(
            first.name, False, first.dtype, first.device, {"waiting": len(self._waiting), **reports}
        )

    def close(self) -> None:
        self._supervisor.close()

    async def _all(self, do: Callable[[Engine], Any]) -> None:
        """Apply ``do`` to every running engine; a replica that is lost restarts."""

        async def one(replica: Replica) -> None:
            engine = replica.engine
            if engine is None:
                return
            try:
                await do(engine)
            except ProcessError as error:
                self._supervisor.restart_lost(replica, engine, error)

        await asyncio.gather(*(one(replica) for replica in self.replicas))
