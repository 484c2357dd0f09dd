"""Dynamic sampling: the batch is the first useful groups in the order of the data, it resumes exactly, and it gives up honestly."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises

from hone.cluster.handles import GroupMeans
from hone.cluster.rollout import RolloutWorker
from hone.config.algorithm import FilterGroupsConfig
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.data.prompts import EpochSampler
from hone.data.types import Sample, StopReason
from hone.errors import ConfigError, RewardError
from hone.generation.protocol import Completion, SamplingParams
from hone.insight.coverage import CoverageLedger
from hone.insight.metrics import MetricStore
from hone.insight.run_files import StepLines
from hone.rewards.score import Cause, Score
from hone.trainers.batch_ops import group_means, sort_rows, values_of
from hone.trainers.group_filter import GroupFilter
from hone.trainers.rollouter import GroupBuffer, Rollouter

N = 3


class Shuffled:
    """An engine that answers with the seed and finishes requests in an order of its own."""

    def __init__(self, seed: int) -> None:
        self.random, self.asked = random.Random(seed), []

    async def generate(self, requests):
        self.asked += [request.request_id for request in requests]
        for request in self.random.sample(requests, len(requests)):
            token = request.seed % 1000
            yield Completion(request.request_id, [token], [0.0], [0.0], StopReason.STOP, (0, 0), 0.0)


class Words:
    def decode(self, ids, **_: Any) -> str:
        return str(ids[0])


def useful(row: int) -> bool:
    return row % 3 != 1


async def score(trajectories) -> list[Score]:
    """Rows with remainder 1 are answered equally well by all, the others not."""
    rows = [int(t.uid.partition("~")[0]) for t in trajectories]
    return [
        Score(float(t.index == 0) if useful(row) else 0.5, terms={"acc": float(t.index == 1 and row % 3 == 2)})
        for row, t in zip(rows, trajectories, strict=True)
    ]


def rollouter(
    size: int,
    batch: int,
    *,
    engine_seed: int = 0,
    limit: int = 50,
    metric: str | None = None,
    scorer=score,
    shuffle=True,
) -> Rollouter:
    dataset: Any = [Sample(uid=str(row), prompt_ids=[row], messages=None, data_source="x") for row in range(size)]
    sampler = EpochSampler(size, batch, shuffle=shuffle, seed=3)
    context: Any = SimpleNamespace(
        config=RLConfig(), tokenizer=Words(), roles={}, rank=0, world=1, engine_devices=None, image_processor=None
    )
    worker = RolloutWorker(context, engine=Shuffled(engine_seed))  # type: ignore[arg-type]

    async def play(samples, seeding):
        return await worker.play(samples, SamplingParams(), n=N, seeding=seeding)

    async def scored(batch):
        return batch.with_columns(score=await scorer(batch.objects("trajectory")))

    async def values(batch, name):
        return values_of(batch, name)

    async def means(batch):
        return group_means(batch)

    async def too_few(batch):
        verdicts = torch.tensor([score.error is None for score in batch.objects("score")], dtype=torch.int64)
        return sort_rows(batch.with_columns(verdict=verdicts), 2)[2]

    filtering = GroupFilter(FilterGroupsConfig(True, metric, limit), scored, values, batch)
    ledger = CoverageLedger(StepLines(Path("none")))
    made = Rollouter(
        dataset,
        sampler,
        play,
        GroupBuffer(batch),
        ledger,
        n=N,
        seed=5,
        means=means,
        too_few_in=too_few,
        max_no_verdict_rate=1.0,
        group_filter=filtering,
    )
    made.asked = worker.engine.asked  # type: ignore[attr-defined]
    return made


def step(rollouter: Rollouter, number: int) -> list:
    async def turn() -> list:
        groups = await rollouter.next_batch(number)
        means = {group.uid: GroupMeans(1.0, 2.0) for group in groups}
        await rollouter.publish(number, sync, means)
        return groups

    async def sync() -> None:
        """There are no weights."""

    groups = asyncio.run(turn())
    counts = rollouter.ledger.counts()
    assert counts["drawn"] == sum(count for name, count in counts.items() if name != "drawn")
    assert counts["in_flight"] == counts["finished"] == 0
    return [
        (
            group.uid,
            [t.response_ids for t in group.batch.objects("trajectory")],
            [s.total for s in group.batch.objects("score")],
        )
        for group in groups
    ]


@given(
    size=st.integers(4, 30),
    batch=st.integers(1, 4),
    steps=st.integers(1, 4),
    orders=st.tuples(st.integers(), st.integers()),
)
@examples(40)
def test_the_batch_is_the_first_useful_groups_whatever_finishes_first(size, batch, steps, orders):
    one, other = (rollouter(size, batch, engine_seed=order) for order in orders)
    plain = EpochSampler(size, batch, shuffle=True, seed=3)
    rows: list[int] = []
    for number in range(1, steps + 1):
        groups = step(one, number)
        assert groups == step(other, number)
        expected = []
        while len(expected) < batch:
            rows += plain.next_batch() if not rows else []
            row = rows.pop(0)
            expected += [row] if useful(row) else []
        assert [int(uid.partition("~")[0]) for uid, _, _ in groups] == expected
        assert all(len(answers) == N and len(set(totals)) > 1 for _, answers, totals in groups)


@given(size=st.integers(4, 12), batch=st.integers(1, 4), cut=st.integers(1, 3))
@examples(30)
def test_a_resumed_run_goes_on_with_the_same_groups(size, batch, cut):
    whole, first, second = (rollouter(size, batch) for _ in range(3))
    expected = [step(whole, number) for number in range(1, 5)]
    seen = [step(first, number) for number in range(1, cut + 1)]
    second.sampler.load_state_dict(first.sampler.state_dict())
    second.load_state_dict(first.state_dict(), finished=dict.fromkeys)  # type: ignore[arg-type] - there are none
    assert seen + [step(second, number) for number in range(cut + 1, 5)] == expected


def test_a_prompt_that_comes_again_within_a_step_is_a_group_with_draws_of_its_own():
    async def only_row_0(trajectories):
        return [Score(float(t.index == 0 and t.uid.startswith("0"))) for t in trajectories]

    one = rollouter(2, 2, scorer=only_row_0, shuffle=False)
    (first, answers, _), (second, others, _) = step(one, 1)
    assert (first, second) == ("0", "0~2") and answers != others
    assert [uid for uid, _, _ in step(one, 2)] == ["0", "0~2"], "names begin anew with every step"


def test_the_metric_decides_and_not_the_reward():
    assert {int(uid.partition("~")[0]) % 3 for uid, _, _ in step(rollouter(9, 3, metric="acc"), 1)} == {2}


def test_length_punishment_makes_no_group_useful():
    async def punished(trajectories):
        return [Score(1.0 - t.index, unshaped=1.0) for t in trajectories]

    with raises(ConfigError, "2 all 1", code="E-filter-groups"):
        step(rollouter(4, 2, scorer=punished, limit=1), 1)


def test_it_gives_up_with_the_numbers():
    mentions = ("10 groups", "7 of them", "3 all 0.5", "max_num_gen_batches=2", "rollout.n")
    with raises(ConfigError, *mentions, code="E-filter-groups"):
        step(rollouter(30, 10, limit=1, shuffle=False), 1)


def test_the_bound_is_never_exceeded():
    async def hopeless(trajectories):
        return [Score(0.0) for _ in trajectories]

    one = rollouter(5, 2, scorer=hopeless, limit=3)
    with raises(ConfigError, "6 groups", "0 of them", code="E-filter-groups"):
        step(one, 1)
    assert len(one.asked) == 3 * 2 * N  # type: ignore[attr-defined]


def test_an_unknown_metric_names_those_there_are():
    with raises(ConfigError, "accuracy", "acc") as caught:
        step(rollouter(9, 3, metric="accuracy"), 1)
    assert caught.value.fix == "algorithm.filter_groups.metric=acc"


@pytest.mark.parametrize(("others", "useful"), [((1.0, 0.0), 2), ((1.0, 1.0), 0)])
def test_what_has_no_verdict_takes_no_part_in_the_comparison(others, useful):
    async def scorer(trajectories):
        lost = Score(0.0, error="raised", cause=Cause.RAISED)
        return [lost if t.index == 2 else Score(1.0, terms={"acc": others[t.index]}) for t in trajectories]

    one = rollouter(4, 2, metric="acc", scorer=scorer, limit=1)
    if useful:
        assert len(step(one, 1)) == useful
    else:
        with raises(ConfigError, "2 groups", "0 of them", code="E-filter-groups"):
            step(one, 1)


def test_groups_with_one_verdict_are_replaced_and_too_many_end_the_run():
    async def scorer(trajectories):
        lost = Score(0.0, error="raised", cause=Cause.RAISED)
        return [lost if t.index and t.uid != "1" else Score(float(t.index)) for t in trajectories]

    one = rollouter(9, 2, scorer=scorer, shuffle=False)
    with raises(RewardError, "3 groups", where="reward.max_no_verdict_rate"):
        step(one, 1)
    assert one.ledger.counts()["failed"] == 2


def test_metrics_of_a_step():
    one, metrics = rollouter(9, 3, shuffle=False), MetricStore()
    step(one, 1)
    assert one.group_filter is not None
    one.group_filter.report(metrics)
    tried = one.group_filter.tried
    evicted = tried - 3
    assert evicted > 0
    assert metrics.reduce() == {
        "training/filter_groups/tried_groups": tried,
        "training/filter_groups/evicted_ratio": evicted / tried,
        "training/filter_groups/evicted_samples": evicted * N,
        "training/filter_groups/evicted_value": 0.5,
    }


def test_evicting_what_is_not_there():
    buffer = GroupBuffer(1)
    with pytest.raises(KeyError):
        buffer.evict("a")
    buffer.admit(["a"])
    with pytest.raises(KeyError):
        buffer.evict("a")
    buffer.put(Sample("a", [1], None, "x"), Batch({"uid": ["a"]}))
    buffer.evict("a")
    assert buffer.free_slots == 1 and not buffer.ready
    buffer.admit(["a"])
