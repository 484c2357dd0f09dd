"""The pool as an engine: a queue, the choice of a replica, and retries.

::

    generate --> queue --> replica with the fewest outstanding tokens that has room --> completion
                   ^          |   (an episode goes where its last turn was)
                   +----------+ lost, or over its time: to the front of the queue, for another replica

The tokens of a request depend on its seed alone, so one that is served again gives what it would have given. A completion is
delivered once: a request leaves the queue only into one replica at a time.
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
from hone.generation.pool.concurrency import Concurrency
from hone.generation.pool.replica import Replica, ReplicaState
from hone.generation.pool.supervision import Supervisor, within
from hone.generation.protocol import Completion, Engine, EngineDescription, GenerationRequest

MOST_HOMES = 65536
"""Episodes whose replica is remembered; the oldest are forgotten first."""


@dataclass(eq=False)
class Job:
    """A request on its way: where its answer goes, and how often it was tried."""

    number: int
    request: GenerationRequest
    answers: asyncio.Queue[Completion | BaseException]
    since: float
    """When it began to wait (``time.monotonic``)."""
    attempts: int = 0
    slow: set[Replica] = field(default_factory=set)
    """Replicas in which it took too long."""
    task: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> int:
        """Tokens it may come to hold."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


class EnginePool:
    """Several engines as one.

    Args:
        start: makes the engine of the replica with this number; called in a thread, again when that engine is lost.
        count: of replicas.
        limits: the block ``rollout.server_pool``; None has its defaults.
        concurrency: requests that a replica gets at once in the beginning; the limit then follows its engine's cache.
        bucket_bytes: of weights that replicas are given at a time.
        delta: whether the engines take what changed since the version before
            (:meth:`hone.generation.remote.ServedEngine.load_weights`); it is found once for all of them.

    Raises:
        HoneError: an engine cannot be started.
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
            raise ValueError("a pool has at least one replica")
        self.limits = replace(limits) if limits is not None else ServerPoolConfig()
        self.replicas = [Replica(index, Concurrency(concurrency)) for index in range(count)]
        self._bucket_bytes, self._paused = bucket_bytes, False
        self._supervisor = Supervisor(self, start, delta=delta)
        self._numbers = itertools.count()
        self._waiting: deque[Job] = deque()
        self._homes: dict[str, Replica] = {}
        self._room = asyncio.Event()
        self._supervisor.start_all()

    @property
    def version(self) -> int:
        """Of the weights that were published last."""
        return self._supervisor.weights.version

    # requests --------------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        """Serve the requests, yielding each completion as it finishes. A caller that goes away ends its requests.

        Raises:
            GenerationError: a request cannot be served, or took too long in every replica that tried; or the last publication
                of weights failed.
            ProcessError: no replica is left.
        """
        self._supervisor.attend()
        self._check_whole()
        answers: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        begun = time.monotonic()
        jobs = [Job(next(self._numbers), request, answers, begun) for request in requests]
        while len(self._waiting) + len(jobs) > self.limits.max_queued_requests and self._waiting:
            self._room.clear()
            await self._room.wait()
        self._waiting.extend(jobs)
        self.dispatch()
        try:
            for _ in jobs:
                answer = await answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:
            self._leave(jobs)

    def dispatch(self) -> None:
        """Give what waits to replicas that have room, first come, first served."""
        while self._waiting and all(replica.state is ReplicaState.LOST for replica in self.replicas):
            self._waiting.popleft().answers.put_nowait(self._none_left())
        while self._waiting and not self._paused:
            replica = self._choose(self._waiting[0])
            if replica is None:
                break
            job = self._waiting.popleft()
            replica.begin(job.number, job.tokens)
            if job.request.session is not None:
                self._homes.pop(job.request.session, None)
                self._homes[job.request.session] = replica
                if len(self._homes) > MOST_HOMES:
                    del self._homes[next(iter(self._homes))]
            job.task = asyncio.get_running_loop().create_task(self._serve(job, replica))
        if len(self._waiting) < self.limits.max_queued_requests:
            self._room.set()

    def _choose(self, job: Job) -> Replica | None:
        """The home of the episode while that has room, else the replica with the fewest outstanding tokens."""
        home = self._homes.get(job.request.session) if job.request.session is not None else None
        if home is not None and home.has_room and home not in job.slow:
            return home
        free = [replica for replica in self.replicas if replica.has_room]
        return min(free, key=lambda replica: (replica in job.slow, replica.load, replica.index), default=None)

    async def _serve(self, job: Job, replica: Replica) -> None:
        job.attempts += 1
        started = time.monotonic()
        answer: Completion | BaseException | None = None
        engine = replica.engine
        assert engine is not None
        try:
            answer = await within(self.limits.request_timeout, self._completion(job.request, engine))
            replica.note(answer, started - job.since, time.monotonic() - started)
        except ProcessError as error:
            self._supervisor.lost(replica, engine, error)
            answer = self._again(job, replica, error)
        except TimeoutError:
            job.slow.add(replica)
            slow = GenerationError(
                f"request '{job.request.request_id}' took more than {self.limits.request_timeout:g} s in a replica, "
                f"{job.attempts} times",
                why="replicas are overloaded or hang",
                fix=f"actor_rollout_ref.rollout.server_pool.request_timeout={2 * (self.limits.request_timeout or 0):g}, "
                "or a smaller data.max_response_length",
                where="actor_rollout_ref.rollout.server_pool.request_timeout",
            )
            answer = self._again(job, replica, slow)
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
                f"the engine ended without an answer to request '{request.request_id}'", fix="see its log"
            ) from None
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def _again(self, job: Job, replica: Replica, error: BaseException) -> BaseException | None:
        """Put a job back to the front of the queue; returns the error when it was tried often enough."""
        replica.window.retried += 1
        if job.attempts >= self.limits.max_attempts:
            return error
        job.since = time.monotonic()
        self._waiting.appendleft(job)
        return None

    def _leave(self, jobs: Sequence[Job]) -> None:
        """The caller is gone, or has all it wants."""
        numbers = {job.number for job in jobs}
        if any(job.number in numbers for job in self._waiting):
            self._waiting = deque(job for job in self._waiting if job.number not in numbers)
        for job in jobs:
            if job.task is not None:
                job.task.cancel()

    def _check_whole(self) -> None:
        weights = self._supervisor.weights
        if not weights.whole and not self._supervisor.publishing:
            raise GenerationError(
                f"weights later than version {weights.version} have arrived only in part",
                why="the engines would sample from a mixture of two policies",
                fix="send all weights of a version again; the error before this one says why they were refused",
            )

    def _none_left(self) -> ProcessError:
        problems = "; ".join(f"replica {replica.index}: {replica.problem}" for replica in self.replicas)
        return ProcessError(
            f"no replica of {len(self.replicas)} is left, and none can be started: {problems}",
            why="there is nobody to generate",
            fix="see the engines' logs",
        )

    # the rest of the protocol ----------------------------------------------------------------------------------------

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
        """Give new weights to all replicas. One that is lost meanwhile gets them when it is back.

        Raises:
            GenerationError: the engines refuse them.
        """
        self._supervisor.attend()
        await self._supervisor.publish(weights, version, last=last, bucket_bytes=self._bucket_bytes)
        if last and not self._paused:
            await self._supervisor.admit()

    async def pause(self) -> None:
        """Stop decoding everywhere; requests stay."""
        self._paused = True
        await self._all(lambda engine: engine.pause())

    async def resume(self) -> None:
        """Go on. Replicas that took new weights during the pause are admitted now."""
        await self._all(lambda engine: engine.resume())
        self._paused = False
        await self._supervisor.admit()
        self.dispatch()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the given requests (all when None) with what they have."""
        wanted = None if request_ids is None else set(request_ids)
        kept: deque[Job] = deque()
        for job in self._waiting:
            if wanted is None or job.request.request_id in wanted:
                nothing = Completion(
                    job.request.request_id, [], [], [], StopReason.ABORTED, (self.version, self.version)
                )
                job.answers.put_nowait(nothing)
            else:
                kept.append(job)
        self._waiting = kept
        await self._all(lambda engine: engine.abort(request_ids))

    async def sleep(self) -> None:
        """Give cache memory back everywhere."""
        await self._all(lambda engine: engine.sleep())

    async def wake(self) -> None:
        """Take it again."""
        await self._all(lambda engine: engine.wake())

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        """These episodes are over: forget where they were."""
        for session in sessions:
            self._homes.pop(session, None)
        await self._all(lambda engine: engine.end_sessions(sessions))

    async def drain(self, index: int) -> None:
        """Let a replica finish what it has and give it nothing more; :meth:`admit` ends that."""
        await self._supervisor.drain(self.replicas[index])

    def admit(self, index: int) -> None:
        """Give work to a drained replica again."""
        if self.replicas[index].state is ReplicaState.DRAINING:
            self.replicas[index].state = ReplicaState.SERVING
            self.dispatch()

    async def take_metrics(self) -> list[dict[str, float]]:
        """Metrics of each replica since the last call; see :meth:`Replica.take_metrics`."""
        await self._supervisor.probe()
        return [replica.take_metrics() for replica in self.replicas]

    def describe(self) -> EngineDescription:
        """What its first engine is, with a report on each replica."""
        reports: dict[str, Any] = {f"replica_{replica.index}": replica.report() for replica in self.replicas}
        found = next(replica.description for replica in self.replicas if replica.description is not None)
        return EngineDescription(
            found.name, False, found.dtype, found.device, {"waiting": len(self._waiting), **reports}
        )

    def close(self) -> None:
        """End all engines."""
        self._supervisor.close()

    async def _all(self, do: Callable[[Engine], Any]) -> None:
        """Do something in every replica that is there; one that is lost by it is started again."""

        async def one(replica: Replica) -> None:
            engine = replica.engine
            if engine is None:
                return
            try:
                await do(engine)
            except ProcessError as error:
                self._supervisor.lost(replica, engine, error)

        await asyncio.gather(*(one(replica) for replica in self.replicas))
