"""Replicas that live: started, probed, started again when they are lost, and admitted once they have the present weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hone.errors import GenerationError, HoneError, ProcessError
from hone.generation.pool.replica import Replica, ReplicaState
from hone.generation.pool.weights import PublishedWeights
from hone.generation.protocol import Engine, EngineDescription, GenerationRequest, SamplingParams
from hone.generation.remote.transports import buckets

if TYPE_CHECKING:
    from hone.generation.pool.pool import EnginePool

log = logging.getLogger("hone.generation.pool")
_PAUSE = 0.2
Started = tuple[Engine, EngineDescription]
T = TypeVar("T")


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """What ``work`` gives. Unlike ``asyncio.timeout`` it does not take an answer that came while the event loop was busy with
    something else, an update of the policy say, for a late one.

    Raises:
        TimeoutError: there is no answer after so many seconds.
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
    """Looks after the replicas of a pool.

    ::

        STARTING --> (has the present weights: one token is sampled) --> SERVING <--> DRAINING
           ^  |                                                             |
           |  +--> FENCED: must wait for weights --> (the same) ------------+
           +------ lost: its process died, or a probe was not answered -----+       STARTING --> LOST after several tries

    Attributes:
        weights: that were published last.

    Args:
        pool: whose replicas they are.
        start: makes an engine.
        delta: whether engines are told what changed since the version before (:class:`~hone.generation.remote.ServedEngine`).
    """

    def __init__(self, pool: EnginePool, start: Callable[[int], Engine], *, delta: bool) -> None:
        self._pool, self._start, self._delta = pool, start, delta
        self.weights = PublishedWeights()
        self._threads = ThreadPoolExecutor(max_workers=4 * len(pool.replicas), thread_name_prefix="hone-pool")
        self._begun: dict[Replica, Future[Started]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._taking: dict[Replica, Engine] | None = None
        self._taken: dict[Replica, Engine] = {}
        self._closed = False

    @property
    def publishing(self) -> bool:
        """Whether more weights of a version are on their way."""
        return self._taking is not None

    def start_all(self) -> None:
        """Start every replica, all at once.

        Raises:
            HoneError: one cannot be started.
        """
        starting = [self._threads.submit(self._begin, replica.index) for replica in self._pool.replicas]
        problem: BaseException | None = None
        for replica, future in zip(self._pool.replicas, starting, strict=True):
            try:
                replica.takes(*future.result())
                replica.state = ReplicaState.SERVING
            except BaseException as error:  # noqa: BLE001 - the others must be ended before it is raised
                problem = error
        if problem is not None:
            self.close()
            raise problem
        served = {replica.description.dtype for replica in self._pool.replicas if replica.description is not None}
        self.weights.dtype = getattr(torch, served.pop()) if len(served) == 1 else None

    def attend(self) -> None:
        """Watch the replicas while somebody needs them on this event loop."""
        loop = asyncio.get_running_loop()
        if self._watch is None or self._watch.done() or self._watch.get_loop() is not loop:
            self._watch = loop.create_task(self._probe_now_and_then())
            for replica in self._pool.replicas:  # what was begun on another loop ended with it
                if replica.state is ReplicaState.STARTING:
                    self._spawn(self._restart(replica))

    def lost(self, replica: Replica, engine: Engine, error: BaseException) -> None:
        """A replica's engine is gone: start another. What it had under way goes back to the queue by itself."""
        if self._closed or replica.engine is not engine or replica.state in (ReplicaState.STARTING, ReplicaState.LOST):
            return  # it is another engine by now, or will be
        what = error.what if isinstance(error, HoneError) else "it did not answer"
        replica.state, replica.problem = ReplicaState.STARTING, what
        log.warning("replica %d is lost and is started again: %s", replica.index, what)
        self._spawn(self._restart(replica))

    async def drain(self, replica: Replica) -> None:
        """Give a replica nothing more, and wait until it has finished."""
        if replica.state is ReplicaState.SERVING:
            replica.state = ReplicaState.DRAINING
        while replica.under_way:
            await asyncio.sleep(_PAUSE / 10)

    # weights ---------------------------------------------------------------------------------------------------------

    async def publish(
        self, weights: Iterable[tuple[str, Tensor]], version: int, *, last: bool, bucket_bytes: int
    ) -> None:
        """Give weights to all replicas; see :meth:`EnginePool.load_weights`."""
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
                    await asyncio.gather(sending, asyncio.to_thread(self.weights.add, bucket))  # engines load meanwhile
        except BaseException:
            self._taking = None  # the replicas stay fenced, and the next publication begins anew
            raise
        if last:
            self.weights.finish(version)
            self._taken, self._taking = self._taking, None
            for replica in self._pool.replicas:
                if replica.state is ReplicaState.FENCED and self._taken.get(replica) is not replica.engine:
                    replica.state = ReplicaState.STARTING
                    self._spawn(self._restart(replica))

    async def admit(self) -> None:
        """Let the replicas that have taken the last version serve."""
        taken, self._taken = self._taken, {}
        await asyncio.gather(*(self._admit_or_lose(replica, engine) for replica, engine in taken.items()))

    def _fence(self) -> dict[Replica, Engine]:
        """Give no replica more requests until it has new weights; returns those that can take some."""
        taking = {}
        for replica in self._pool.replicas:
            if replica.engine is not None and replica.state not in (ReplicaState.STARTING, ReplicaState.LOST):
                replica.state = ReplicaState.FENCED
                taking[replica] = replica.engine
        return taking

    async def _send(
        self, taking: dict[Replica, Engine], bucket: Sequence[tuple[str, Tensor]], version: int, **how: Any
    ) -> None:
        async def one(replica: Replica, engine: Engine) -> None:
            try:
                await engine.load_weights(bucket, version, **how)
            except ProcessError as error:
                self.lost(replica, engine, error)

        await asyncio.gather(*(one(replica, engine) for replica, engine in taking.items() if replica.engine is engine))

    async def _admit_or_lose(self, replica: Replica, engine: Engine) -> None:
        if replica.engine is not engine or replica.state is not ReplicaState.FENCED:
            return
        try:
            await self._admit(replica, engine)
        except (ProcessError, TimeoutError) as error:
            self.lost(replica, engine, error)

    async def _admit(self, replica: Replica, engine: Engine) -> None:
        """Let a replica serve, if a token that it samples bears the version of the present weights.

        Raises:
            HoneError: it does not, or the engine is lost.
            TimeoutError: there is no answer.
        """
        version = self.weights.version
        request = GenerationRequest("admission", [0], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))

        async def sampled() -> list[tuple[int, int]]:
            return [completion.weight_versions async for completion in engine.generate([request])]

        (found,) = await within(self._pool.limits.health_check_timeout, sampled())
        if found != (version, version):
            raise GenerationError(
                f"replica {replica.index} samples from weights {found}, published is {version}",
                why="it would serve another policy than the one trained",
                fix="see the engine's log",
            )
        if replica.engine is engine:
            replica.state = ReplicaState.SERVING
            self._pool.dispatch()

    # life ------------------------------------------------------------------------------------------------------------

    async def _restart(self, replica: Replica) -> None:
        """Give a replica a living engine with the present weights, and admit it."""
        for attempt in range(self._pool.limits.start_attempts):
            try:
                engine = replica.engine if attempt == 0 and self._lives(replica) else await self._another(replica)
                if engine is None or self._closed:
                    return
                await self._bring_up_to_date(replica, engine)
                return
            except (HoneError, TimeoutError) as error:
                replica.problem = error.what if isinstance(error, HoneError) else "it did not answer"
                log.warning("replica %d cannot be started: %s", replica.index, replica.problem)
                await asyncio.sleep(_PAUSE * 2**attempt)
        replica.state = ReplicaState.LOST
        await self._end(replica)
        self._pool.dispatch()

    @staticmethod
    def _lives(replica: Replica) -> bool:
        """Whether its engine only lacks weights."""
        return replica.engine is not None and not replica.problem

    async def _another(self, replica: Replica) -> Engine | None:
        await self._end(replica)
        if replica not in self._begun:
            self._begun[replica] = self._threads.submit(self._begin, replica.index)
        try:
            engine, told = await asyncio.shield(asyncio.wrap_future(self._begun[replica]))
        except asyncio.CancelledError:
            raise  # this loop ends; the next one, or the end of the pool, goes on from here
        except BaseException:
            del self._begun[replica]
            raise
        del self._begun[replica]
        if self._closed:
            engine.close()
            return None
        replica.takes(engine, told)
        replica.problem = ""
        return engine

    def _begin(self, index: int) -> Started:
        engine = self._start(index)
        try:
            return engine, engine.describe()
        except BaseException:
            engine.close()
            raise

    async def _end(self, replica: Replica) -> None:
        old, replica.engine = replica.engine, None
        if old is not None:
            await asyncio.shield(asyncio.wrap_future(self._threads.submit(old.close)))

    async def _bring_up_to_date(self, replica: Replica, engine: Engine) -> None:
        """Give an engine that was just started the present weights, as often as there are new ones meanwhile."""
        weights = self.weights
        while self._taking is None and weights.whole:
            version = weights.version
            if version:
                await engine.load_weights(weights.tensors(), version)
            if self._taking is None and version == weights.version:
                await self._admit(replica, engine)
                return
        replica.state = ReplicaState.FENCED  # the end of this publication, or the next one, brings its weights

    async def _probe_now_and_then(self) -> None:
        while not self._closed:
            await asyncio.sleep(self._pool.limits.health_check_period)
            await self.probe()

    async def probe(self) -> None:
        """Ask every replica for its counters; one that does not answer hangs, and is started again."""
        serving = [r for r in self._pool.replicas if r.state in (ReplicaState.SERVING, ReplicaState.DRAINING)]
        await asyncio.gather(*(self._probe(replica) for replica in serving))

    async def _probe(self, replica: Replica) -> None:
        engine, seconds = replica.engine, self._pool.limits.health_check_timeout
        if engine is None:
            return
        try:
            found = await within(seconds, asyncio.get_running_loop().run_in_executor(self._threads, engine.describe))
        except TimeoutError:
            self.lost(replica, engine, ProcessError(f"replica {replica.index} did not answer within {seconds:g} s"))
        except ProcessError as error:
            self.lost(replica, engine, error)
        else:
            if replica.engine is engine:
                replica.description = found
                replica.concurrency.note_preemptions(int(found.stats.get("preemptions", 0)))

    def close(self) -> None:
        """End everything."""
        self._closed = True
        for task in (self._watch, *self._tasks):
            if task is not None:
                with contextlib.suppress(RuntimeError):  # its event loop is closed already
                    task.cancel()
        for begun in self._begun.values():
            begun.cancel()
            begun.add_done_callback(_close_if_started)
        for replica in self._pool.replicas:
            engine, replica.engine, replica.state = replica.engine, None, ReplicaState.LOST
            if engine is not None:
                engine.close()
        self._threads.shutdown(wait=True)  # engines that are being started, or ended

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _close_if_started(begun: Future[Started]) -> None:
    if not begun.cancelled() and begun.exception() is None:
        begun.result()[0].close()
