"""The pool as an engine: a queue, the choice of a replica, and retries.

::

    generate --> queue --> available replica with the fewest outstanding tokens --> completion
                   ^          |   (an episode returns to the replica of its last turn)
                   +----------+ lost or timed out: to the front of the queue, for another replica

The tokens of a request depend only on its seed, so a retry gives the same tokens. A completion is delivered once, because a
request is in at most one replica at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hone.config.engines import ServerPoolConfig
from hone.data.types import StopReason
from hone.errors import GenerationError, ProcessError
from hone.generation.pool.replica import Concurrency, Replica, ReplicaState
from hone.generation.pool.supervision import Supervisor, within
from hone.generation.protocol import Completion, Engine, EngineDescription, GenerationRequest, incomplete_weights

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
