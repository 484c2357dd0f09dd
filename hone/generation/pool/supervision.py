"""Replicas that live: started, probed, started again when they are lost, and admitted once they have the present weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hone.errors import GenerationError, HoneError, ProcessError
from hone.generation.pool.replica import Replica, ReplicaState
from hone.generation.protocol import Engine, EngineDescription, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from hone.generation.pool.pool import EnginePool

log = logging.getLogger("hone.generation.pool")
BUCKET_TENSORS = 64
"""Tensors that are given to all replicas at a time."""
_PAUSE = 0.2
Started = tuple[Engine, EngineDescription]


class Supervisor:
    """Looks after the replicas of a pool.

    ::

        STARTING --> (has the present weights: one token is sampled) --> SERVING <--> DRAINING
           ^  |                                                             |
           |  +--> FENCED: must wait for weights --> (the same) ------------+
           +------ lost: its process died, or a probe was not answered -----+       STARTING --> LOST after several tries

    Args:
        pool: whose replicas they are.
        start: makes an engine.
        refill: gives the present weights.
    """

    def __init__(
        self,
        pool: EnginePool,
        start: Callable[[int], Engine],
        refill: Callable[[], Iterable[tuple[str, Tensor]]] | None,
    ) -> None:
        self._pool, self._start, self._refill = pool, start, refill
        self._threads = ThreadPoolExecutor(max_workers=4 * len(pool.replicas), thread_name_prefix="hone-pool")
        self._begun: dict[Replica, Future[Started]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._taking: dict[Replica, Engine] | None = None
        self._closed = False

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

    def attend(self) -> None:
        """Watch the replicas while somebody generates on this event loop."""
        loop = asyncio.get_running_loop()
        if self._watch is None or self._watch.done() or self._watch.get_loop() is not loop:
            self._watch = loop.create_task(self._probe_all())
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

    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int, last: bool) -> None:
        """Give weights to all replicas; see :meth:`EnginePool.load_weights`."""
        pool = self._pool
        if self._taking is None:
            self._taking = {}
            for replica in pool.replicas:
                if replica.engine is not None and replica.state is not ReplicaState.STARTING:
                    replica.state = ReplicaState.FENCED
                    self._taking[replica] = replica.engine
        taking = self._taking
        try:
            bucket: list[tuple[str, Tensor]] = []
            for entry in weights:
                bucket.append(entry)
                if len(bucket) == BUCKET_TENSORS:
                    await self._send(taking, bucket, version, last=False)
                    bucket = []
            await self._send(taking, bucket, version, last=last)
        except BaseException:
            self._taking = None  # the replicas stay fenced, and the next publication begins anew
            raise
        if not last:
            return
        self._taking, pool.version = None, version
        await asyncio.gather(*(self._admit_or_lose(replica, engine) for replica, engine in taking.items()))
        for replica in pool.replicas:
            if replica.state is ReplicaState.FENCED and replica not in taking and self._refill is not None:
                replica.state = ReplicaState.STARTING
                self._spawn(self._restart(replica))
        if self._refill is None and not any(replica.state is ReplicaState.SERVING for replica in pool.replicas):
            raise ProcessError(f"no replica took the weights of version {version}", fix="see the engines' logs")

    async def _send(
        self, taking: dict[Replica, Engine], bucket: list[tuple[str, Tensor]], version: int, *, last: bool
    ) -> None:
        async def one(replica: Replica, engine: Engine) -> None:
            try:
                await engine.load_weights(bucket, version, last=last)
            except ProcessError as error:
                self.lost(replica, engine, error)

        await asyncio.gather(*(one(replica, engine) for replica, engine in taking.items() if replica.engine is engine))

    async def _admit_or_lose(self, replica: Replica, engine: Engine) -> None:
        if replica.engine is not engine:
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
        version = self._pool.version
        request = GenerationRequest("admission", [0], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        async with asyncio.timeout(self._pool.limits.answer_seconds):
            found = [completion async for completion in engine.generate([request])]
        if found[0].weight_versions != (version, version):
            raise GenerationError(
                f"replica {replica.index} samples from weights {found[0].weight_versions}, published is {version}",
                why="it would serve another policy than the one trained",
                fix="see the engine's log",
            )
        if replica.engine is engine:
            replica.state = ReplicaState.SERVING
            self._pool.dispatch()

    # life ------------------------------------------------------------------------------------------------------------

    async def _restart(self, replica: Replica) -> None:
        """Give a replica a living engine with the present weights, and admit it."""
        for attempt in range(self._pool.limits.starts):
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
        pool = self._pool
        if self._taking is None and pool.version == 0:
            await self._admit(replica, engine)
            return
        if self._taking is None and self._refill is not None:
            version = pool.version
            await engine.load_weights(self._refill(), version)
            if self._taking is None and version == pool.version:
                await self._admit(replica, engine)
                return
        replica.state = ReplicaState.FENCED  # the end of this publication, or the next one, brings its weights

    async def _probe_all(self) -> None:
        """Ask every replica for its counters now and then; one that does not answer hangs."""
        while not self._closed:
            await asyncio.sleep(self._pool.limits.probe_seconds)
            serving = [r for r in self._pool.replicas if r.state in (ReplicaState.SERVING, ReplicaState.DRAINING)]
            await asyncio.gather(*(self._probe(replica) for replica in serving))

    async def _probe(self, replica: Replica) -> None:
        engine, seconds = replica.engine, self._pool.limits.answer_seconds
        if engine is None:
            return
        try:
            async with asyncio.timeout(seconds):
                found = await asyncio.get_running_loop().run_in_executor(self._threads, engine.describe)
        except TimeoutError:
            self.lost(replica, engine, ProcessError(f"replica {replica.index} did not answer within {seconds:g} s"))
        except ProcessError as error:
            self.lost(replica, engine, error)
        else:
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
