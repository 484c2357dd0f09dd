"""A pool over engines that a test controls, and requests to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

import torch
from support.patience import SOON

from hone.config.engines import ServerPoolConfig
from hone.data.types import StopReason
from hone.errors import GenerationError, ProcessError
from hone.generation.pool import EnginePool
from hone.generation.protocol import Completion, EngineDescription, GenerationRequest, SamplingParams

QUICK = ServerPoolConfig(health_check_period=0.05, health_check_timeout=10.0)
WEIGHTS = [(f"w{number}", torch.zeros(1)) for number in range(150)]


class Fake:
    """An engine whose completions say who made them; it can be killed, hang, and lose its weights."""

    def __init__(self, index: int, life: int, seconds: float = 0.0) -> None:
        self.index, self.life, self.seconds = index, life, seconds
        self.version, self.arriving = 0, 0
        self.paused, self.keeps_version, self.preemptions = False, False, 0
        self.dead, self.hangs, self.closed = False, False, False
        self.served: list[str] = []
        self.under_way = 0
        self.most = 0
        self.ended: list[str] = []

    def check(self) -> None:
        if self.dead:
            raise ProcessError(f"engine {self.index} is dead")

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        for request in requests:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            try:
                until = time.monotonic() + self.seconds
                while time.monotonic() < until or self.hangs or self.paused:
                    await asyncio.sleep(0.001)
                    self.check()
                self.check()
                if request.sampling.max_tokens == 13:
                    raise GenerationError("thirteen tokens are not served")
            finally:
                self.under_way -= 1
            self.served.append(request.request_id)
            ids = [(request.seed + place) % 1000 for place in range(request.sampling.max_tokens)]
            logs, versions = [-1.0] * len(ids), (self.version, self.version)
            yield Completion(request.request_id, ids, logs, logs, StopReason.LENGTH, versions, self.seconds)

    async def load_weights(self, weights: Iterable[Any], version: int, *, last: bool = True) -> None:
        self.check()
        self.arriving += len(list(weights))
        await asyncio.sleep(0)
        if last:
            if self.arriving not in (0, len(WEIGHTS)):
                raise GenerationError(f"{self.arriving} of {len(WEIGHTS)} weights have arrived")
            self.version, self.arriving = self.version if self.keeps_version else version, 0

    async def pause(self) -> None:
        self.check()
        self.paused = True

    async def resume(self) -> None:
        self.check()
        self.paused = False

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self.check()

    async def wake(self, *, cache: bool = True) -> None:
        self.check()

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        self.ended += sessions

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        pass

    def describe(self) -> EngineDescription:
        while self.hangs and not self.closed:
            time.sleep(0.01)
        self.check()
        prompts = 2 * len(self.served)
        stats = {"prefill_tokens": 3 * prompts, "cached_tokens": prompts, "preemptions": self.preemptions}
        return EngineDescription("fake", False, "float32", "cpu", stats)

    def close(self) -> None:
        self.closed = self.dead = True


class Makers:
    """Starts fakes; keeps all it has started."""

    kind = Fake

    def __init__(self, seconds: float = 0.0, fails: Callable[[int, int], bool] = lambda index, life: False) -> None:
        self.seconds, self.fails = seconds, fails
        self.made: list[Fake] = []
        self.tries: dict[int, int] = {}

    def __call__(self, index: int) -> Fake:
        life = self.tries[index] = self.tries.get(index, -1) + 1
        if self.fails(index, life):
            raise GenerationError(f"engine {index} does not start")
        self.made.append(self.kind(index, life, self.seconds))
        return self.made[-1]

    def living(self, index: int) -> Fake:
        return [fake for fake in self.made if fake.index == index][-1]


def ask(number: int, tokens: int = 4, session: str | None = None) -> GenerationRequest:
    return GenerationRequest(f"r{number}", [1, 2], SamplingParams(max_tokens=tokens), seed=number, session=session)


def expected(request: GenerationRequest) -> list[int]:
    return [(request.seed + place) % 1000 for place in range(request.sampling.max_tokens)]


async def collect(pool: EnginePool, requests: Sequence[GenerationRequest]) -> list[Completion]:
    return [completion async for completion in pool.generate(requests)]


def run(makers: Makers, count: int, work: Callable[[EnginePool], Coroutine[Any, Any, None]], **options: Any) -> None:
    pool = EnginePool(makers, count, limits=options.pop("limits", QUICK), **options)
    try:
        asyncio.run(asyncio.wait_for(work(pool), SOON))
    finally:
        pool.close()
    assert all(fake.closed for fake in makers.made), "every engine that was started is ended"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():
            await asyncio.sleep(0.005)
