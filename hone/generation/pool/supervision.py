"""Supervision of replicas: start, probes, restart after a loss, and admission once they have the latest weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from hone.config.engines import ServerPoolConfig
from hone.errors import GenerationError, HoneError, ProcessError
from hone.generation.pool.replica import Replica, ReplicaState
from hone.generation.protocol import Engine, EngineDescription, GenerationRequest, SamplingParams
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
