"""Requests of a limited client never exceed its limit, and use all of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from hone.agents.episode import EngineClient, LimitedClient
from hone.data.types import StopReason
from hone.errors import GenerationError
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams


class Slow:
    """An engine that answers each request after some turns of the loop, and fails those with seed 13.

    Attributes:
        under_way: ids of the requests now.
        counts: numbers of limited requests under way whenever one begins.
    """

    def __init__(self) -> None:
        self.under_way: set[str] = set()
        self.counts: list[int] = []

    async def generate(self, requests: Sequence[GenerationRequest]):
        (request,) = requests
        assert request.request_id not in self.under_way, "two requests of one name"
        self.under_way.add(request.request_id)
        self.counts.append(sum(name.startswith("limited/") for name in self.under_way))
        try:
            for _ in range(1 + request.seed % 7):
                await asyncio.sleep(0)
            if request.seed == 13:
                raise GenerationError("no", fix="none")
            yield Completion(request.request_id, [1], [0.0], [0.0], StopReason.STOP, (0, 0))
        finally:
            self.under_way.discard(request.request_id)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        del request_ids


def request(seed: int) -> GenerationRequest:
    return GenerationRequest("same name", [0], SamplingParams(max_tokens=1), seed=seed)


@pytest.mark.parametrize("limit", [1, 3])
def test_requests_never_exceed_the_limit_and_use_all_of_it(limit: int) -> None:
    async def play() -> Slow:
        engine = Slow()
        others, limited = EngineClient(engine), LimitedClient(engine, lambda: limit)  # type: ignore[arg-type]
        calls = [client.complete(request(seed)) for seed in range(40) for client in (others, limited)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(result, GenerationError) for result in results].count(True) == 2
        assert limited.under_way == 0
        return engine

    engine = asyncio.run(play())
    assert len(engine.counts) == 80 and max(engine.counts) == limit


def test_a_lifted_limit_admits_those_that_wait() -> None:
    async def play() -> tuple[int, int]:
        engine, limits = Slow(), [2]
        limited = LimitedClient(engine, lambda: limits[0] if limits else None)  # type: ignore[arg-type]
        tasks = [asyncio.create_task(limited.complete(request(6))) for _ in range(10)]
        await asyncio.sleep(0)
        before = limited.under_way
        limits.clear()
        limited.admit()
        after = limited.under_way
        await asyncio.gather(*tasks)
        return before, after

    assert asyncio.run(play()) == (2, 10)


def test_cancelled_requests_give_their_places_back() -> None:
    async def play() -> None:
        engine, draw = Slow(), random.Random(0)
        limited = LimitedClient(engine, lambda: 2)  # type: ignore[arg-type]
        tasks = [asyncio.create_task(limited.complete(request(seed))) for seed in range(60)]
        for task in tasks:
            if draw.random() < 0.5:
                task.cancel()
            if draw.random() < 0.3:
                await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert limited.under_way == 0 and max(engine.counts) <= 2
        assert (await limited.complete(request(1))).token_ids == [1]

    asyncio.run(play())
