"""A response that new weights interrupt keeps its tokens and resumes after them, and the caller sees one completion."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hone.agents.episode import EngineClient
from hone.data.types import StopReason
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams


class Counting:
    """An engine whose tokens count on from the prompt's last; a token per turn of the loop, until aborted or complete."""

    def __init__(self) -> None:
        self.version = 0
        self.requests: list[GenerationRequest] = []
        self.aborted: set[str] = set()

    async def generate(self, requests: Sequence[GenerationRequest]):
        (request,) = requests
        self.requests.append(request)
        ids: list[int] = []
        reason, version = StopReason.LENGTH, self.version
        while len(ids) < request.sampling.max_tokens:
            if request.request_id in self.aborted:
                reason = StopReason.ABORTED
                break
            ids.append(request.prompt_ids[-1] + len(ids) + 1)
            await asyncio.sleep(0)
        logs = [-float(token) for token in ids]
        yield Completion(request.request_id, ids, logs, logs, reason, (version, version), seconds=1.0)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        assert request_ids is not None
        self.aborted |= set(request_ids)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_an_interrupted_response_resumes_under_new_weights() -> None:
    async def play() -> tuple[Completion, Completion, Counting]:
        engine = Counting()
        client = EngineClient(engine)  # type: ignore[arg-type]
        first = asyncio.create_task(client.complete(GenerationRequest("a", [0], SamplingParams(max_tokens=20), seed=1)))
        await turns(8)
        await client.interrupt()
        await turns(4)
        late = asyncio.create_task(client.complete(GenerationRequest("b", [100], SamplingParams(max_tokens=2))))
        await turns(10)
        assert not first.done() and not late.done() and len(engine.requests) == 1, "nothing begins before proceed"
        engine.version = 7
        client.proceed()
        return await first, await late, engine

    completion, late, engine = asyncio.run(play())
    assert completion.token_ids == list(range(1, 21)) and completion.log_probs == [-float(t) for t in range(1, 21)]
    cut = completion.token_versions.index(7)
    assert 0 < cut < 20 and completion.token_versions == [0] * cut + [7] * (20 - cut)
    assert (completion.weight_versions, completion.stop_reason, completion.seconds) == ((0, 7), StopReason.LENGTH, 2.0)
    resumed = next(request for request in engine.requests if request.prompt_ids == [0, *range(1, cut + 1)])
    assert resumed.sampling.max_tokens == 20 - cut and resumed.seed != 1
    assert late.token_ids == [101, 102] and late.weight_versions == (7, 7)


def test_a_held_response_stays_in_the_engine() -> None:
    async def play() -> tuple[Completion, int]:
        engine = Counting()
        client = EngineClient(engine)  # type: ignore[arg-type]
        first = asyncio.create_task(client.complete(GenerationRequest("a", [0], SamplingParams(max_tokens=20))))
        await turns(8)
        client.hold()
        late = asyncio.create_task(client.complete(GenerationRequest("b", [100], SamplingParams(max_tokens=2))))
        await turns(60)
        assert first.done() and not late.done()
        begun = len(engine.requests)
        client.proceed()
        await late
        return await first, begun

    completion, begun = asyncio.run(play())
    assert (completion.stop_reason, len(completion.token_ids), begun) == (StopReason.LENGTH, 20, 1)


def test_an_abort_of_the_caller_is_not_an_interruption() -> None:
    async def play() -> tuple[StopReason, bool]:
        engine = Counting()
        client = EngineClient(engine)  # type: ignore[arg-type]
        task = asyncio.create_task(client.complete(GenerationRequest("a", [0], SamplingParams(max_tokens=50))))
        await turns(6)
        await engine.abort([engine.requests[0].request_id])
        completion = await task
        return completion.stop_reason, 0 < len(completion.token_ids) < 50

    assert asyncio.run(play()) == (StopReason.ABORTED, True)


def test_interrupted_before_the_first_token() -> None:
    async def play() -> Completion:
        engine = Counting()
        client = EngineClient(engine)  # type: ignore[arg-type]
        task = asyncio.create_task(client.complete(GenerationRequest("a", [0], SamplingParams(max_tokens=3))))
        await asyncio.sleep(0)
        await client.interrupt()
        engine.aborted.clear()  # an engine that had not seen the request
        engine.version = 1
        client.proceed()
        return await task

    completion = asyncio.run(play())
    assert completion.token_ids == [1, 2, 3] and completion.weight_versions == (1, 1)
