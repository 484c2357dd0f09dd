"""Validation during training: new weights wait for it, its errors reach the learner, and groups keep their share of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hone.agents.episode import EngineClient, LimitedClient
from hone.cluster.handles import GroupMeans
from hone.data.batch import Batch
from hone.data.prompts import EpochSampler
from hone.data.types import Sample, StopReason
from hone.errors import EpisodeError, GenerationError
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.insight.coverage import CoverageLedger
from hone.insight.run_files import StepLines
from hone.trainers.rollouter import GroupBuffer, Rollouter
from hone.trainers.validator import ValidationTask

GROUPS, PLACES, SHARE = 3, 8, 0.25


class Engine:
    """An engine of the current version whose answers take as many turns of the loop as the seed says.

    Attributes:
        version: version of the weights.
        under_way: ids of the requests now.
        counts: for each beginning of a request, the numbers of validation requests and of others under way.
    """

    def __init__(self) -> None:
        self.version = 0
        self.under_way: set[str] = set()
        self.counts: list[tuple[int, int]] = []

    async def generate(self, requests: Sequence[GenerationRequest]):
        (request,) = requests
        self.under_way.add(request.request_id)
        validation = sum(name.startswith("limited/") for name in self.under_way)
        self.counts.append((validation, len(self.under_way) - validation))
        first = self.version
        for _ in range(request.seed):
            await asyncio.sleep(0)
        self.under_way.remove(request.request_id)
        yield Completion(request.request_id, [1], [0.0], [0.0], StopReason.STOP, (first, self.version))

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        del request_ids


class Run:
    """Learner, rollouter and validation on one engine.

    Args:
        rows: validation rows.
        turns: turns of the loop that an answer to a validation row takes.
        partial_rollouts: as the key.
        fails: step whose validation fails.

    Attributes:
        versions: versions of the answers of each validated step.
        synced_during: True if weights changed while a validation was under way.
    """

    def __init__(self, rows: int = 12, turns: int = 20, *, partial_rollouts: bool = False, fails: int | None = None):
        self.engine = Engine()
        self.client = EngineClient(self.engine)  # type: ignore[arg-type]
        self.share: float | None = None
        self.limited = LimitedClient(self.engine, self._limit)  # type: ignore[arg-type]
        self.rows, self.turns, self.fails = rows, turns, fails
        self.versions: dict[int, set[tuple[int, int]]] = {}
        self.synced_during = False
        self.task = ValidationTask(self._validate, self._set_share, SHARE)
        dataset: Any = [Sample(uid=str(row), prompt_ids=[0], messages=None, data_source="x") for row in range(9)]
        self.rollouter = Rollouter(
            dataset,
            EpochSampler(9, GROUPS, shuffle=False, seed=0),
            self._play,
            GroupBuffer(GROUPS, 1),
            CoverageLedger(StepLines(Path())),
            n=2,
            seed=0,
            means=self._means,
            too_few_in=self._too_few_in,
            max_no_verdict_rate=0.0,
            score=self._score,
            partial_rollouts=partial_rollouts,
        )
        self.rollouter.validation = self.task

    async def _too_few_in(self, batch: Any) -> list[str]:
        return []

    def _limit(self) -> int | None:
        return None if self.share is None else int(self.share * PLACES)

    async def _set_share(self, share: float | None) -> None:
        self.share = share
        self.limited.admit()

    async def _answer(self, client: EngineClient, name: str, turns: int) -> Completion:
        return await client.complete(GenerationRequest(name, [0], SamplingParams(max_tokens=1), seed=turns))

    async def _validate(self, step: int) -> None:
        answers = [self._answer(self.limited, f"{step}/{row}", self.turns) for row in range(self.rows)]
        versions = {answer.weight_versions for answer in await asyncio.gather(*answers)}
        if step == self.fails:
            raise GenerationError("the engine failed", fix="none")
        self.versions[step] = versions

    async def _play(self, samples: Sequence[Sample], seeding: tuple[Any, ...]) -> Batch:
        (sample,) = samples
        await asyncio.gather(
            *(self._answer(self.client, f"{sample.uid}/{seeding}/{index}", 4 + index) for index in range(2))
        )
        return Batch({"uid": [sample.uid] * 2})

    async def _score(self, batch: Any) -> Any:
        return batch

    async def _means(self, batch: Any) -> dict[str, GroupMeans]:
        return {uid: GroupMeans(None, 1.0) for uid in batch.uids}

    async def _sync(self) -> None:
        self.synced_during |= any(name.startswith("limited/") for name in self.engine.under_way)
        await self.client.interrupt()
        self.engine.version += 1
        self.client.proceed()

    async def train(self, steps: int, every: int = 1) -> None:
        await self.rollouter.begin_validation(0)
        for step in range(1, steps + 1):
            groups = await self.rollouter.next_batch(step)
            await asyncio.sleep(0)
            means = {group.uid: GroupMeans(None, 1.0) for group in groups}
            await self.rollouter.publish(step, self._sync, means, left=steps - step)
            if step % every == 0:
                await self.rollouter.begin_validation(step)
        await self.rollouter.close()
        await self.rollouter.end_validation()


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("turns", [2, 5, 50])
def test_every_validation_has_the_version_of_its_step_and_its_share(partial: bool, turns: int) -> None:
    run = Run(turns=turns, partial_rollouts=partial)
    asyncio.run(asyncio.wait_for(run.train(6, every=2), 20))
    assert run.versions == {step: {(step, step)} for step in (0, 2, 4, 6)}
    assert not run.synced_during and run.task.step is None
    with_groups = [validation for validation, groups in run.engine.counts if groups]
    assert max(with_groups) == SHARE * PLACES, "the share is a bound, and it is used"


def test_validation_takes_the_engine_when_no_group_is_under_way() -> None:
    run = Run(turns=50)
    asyncio.run(asyncio.wait_for(run.train(3), 20))
    alone = [validation for validation, groups in run.engine.counts if not groups]
    assert max(alone) > SHARE * PLACES
    assert run.share is None


def test_groups_are_trained_while_validation_runs() -> None:
    """The batch of step 1 is complete, and its weights wait, before the first answers of validation are."""

    async def play() -> tuple[bool, bool]:
        run = Run(turns=200)
        await run.rollouter.begin_validation(0)
        await run.rollouter.next_batch(1)
        early = run.task.has_ended
        publish = asyncio.create_task(
            run.rollouter.publish(1, run._sync, {str(r): GroupMeans(None, 1.0) for r in range(3)})
        )
        for _ in range(100):
            await asyncio.sleep(0)
        waits = not publish.done() and run.engine.version == 0
        await publish
        await run.rollouter.close()
        return early, waits

    assert asyncio.run(asyncio.wait_for(play(), 20)) == (False, True)


def test_an_error_of_validation_ends_the_next_weight_sync() -> None:
    run = Run(fails=2)
    with pytest.raises(GenerationError, match="the engine failed"):
        asyncio.run(asyncio.wait_for(run.train(6, every=2), 20))
    assert run.engine.version == 2 and run.versions.keys() == {0}


def test_an_error_of_the_last_validation_is_raised() -> None:
    run = Run(fails=3)
    with pytest.raises(GenerationError, match="the engine failed"):
        asyncio.run(asyncio.wait_for(run.train(3), 20))


def test_an_error_of_a_group_is_raised_while_new_weights_wait_for_validation() -> None:
    run = Run(turns=10_000)
    calls = iter(range(100))

    async def play(samples: Sequence[Sample], seeding: tuple[Any, ...]) -> Batch:
        if next(calls) == 4:
            for _ in range(30):
                await asyncio.sleep(0)
            raise EpisodeError("a tool failed", fix="none")
        return await Run._play(run, samples, seeding)

    run.rollouter.play = play
    with pytest.raises(EpisodeError, match="a tool failed"):
        asyncio.run(asyncio.wait_for(run.train(3), 20))
    assert not run.versions


def test_a_cancelled_run_cancels_its_validation() -> None:
    async def play() -> tuple[bool, int, dict[int, set[tuple[int, int]]]]:
        run = Run(turns=10_000)
        learner = asyncio.create_task(run.train(3))
        for _ in range(50):
            await asyncio.sleep(0)
        others = asyncio.all_tasks() - {learner, asyncio.current_task()}
        for task in (learner, *others):
            task.cancel()
        await asyncio.gather(learner, *others, return_exceptions=True)
        return run.task.has_ended, run.limited.under_way, run.versions

    assert asyncio.run(play()) == (True, 0, {})
