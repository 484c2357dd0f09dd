"""Rewards of training: the soft overlong punishment, and the greedy baseline."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hone.cluster.rollout import RolloutWorker
from hone.config.reward import OverlongBufferConfig, RewardConfig
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.data.types import Sample, StopReason, Trajectory
from hone.generation.protocol import Completion, SamplingParams
from hone.rewards.manager import penalised
from hone.rewards.score import Score
from hone.trainers.algorithm import answer_greedily
from hone.trainers.batch_ops import baselines


def trajectory(length: int) -> Trajectory:
    zeros = [0.0] * length
    return Trajectory(
        "p", length, [1], [2] * length, [1] * length, zeros, zeros, "", StopReason.STOP, Sample("p", [1], None, "x")
    )


def scored(manager: str = "naive", **settings) -> list[Score]:
    """Return the penalised scores of a reward function that has an opinion of its own on each length."""
    lengths = (1, 6, 7, 8, 9, 10)
    scores = [Score(float(length % 2), terms={"acc": 1.0}, extra={"pred": "p"}) for length in lengths]
    config = RewardConfig(reward_manager=manager, overlong_buffer=OverlongBufferConfig(**settings))
    return penalised(scores, [trajectory(length) for length in lengths], config, 10)


def test_off_it_changes_nothing():
    assert [score.total for score in scored()] == [1, 0, 1, 0, 1, 0]
    assert all(score.unshaped is None and score.quality == score.total for score in scored())


def test_the_last_tokens_cost_more_and_more():
    found = scored(enable=True, len=4, penalty_factor=2.0)
    assert [score.total for score in found] == pytest.approx([1, 0, 0.5, -1, -0.5, -2])
    assert [score.quality for score in found] == [1, 0, 1, 0, 1, 0]
    assert all(score.terms == {"acc": 1.0} and score.extra == {"pred": "p"} for score in found)


def test_the_manager_dapo_switches_it_on():
    assert scored("dapo", len=4) == scored(enable=True, len=4) != scored("prime", len=4)


def test_logged_as_terms():
    found = scored(enable=True, len=4, log=True)
    assert [score.terms["overlong_reward"] for score in found] == pytest.approx([0, 0, -0.25, -0.5, -0.75, -1])
    assert [score.terms["overlong"] for score in found] == [0, 0, 1, 1, 1, 1]


class Greedy:
    """Answers each prompt with its first token; keeps what it was asked."""

    def __init__(self):
        self.requests = []

    async def generate(self, requests):
        self.requests += requests
        for request in reversed(requests):
            yield Completion(request.request_id, [request.prompt_ids[0]], [0.0], [0.0], StopReason.STOP)


class Words:
    def decode(self, ids, **_: Any) -> str:
        return str(ids[0])


class Work:
    async def score(self, batch, *, training):
        assert training
        return Batch({"score": [Score(float(t.text)) for t in batch.objects("trajectory")]})


def test_every_prompt_is_asked_once_and_its_score_goes_to_all_its_rows():
    engine: Any = Greedy()
    context: Any = SimpleNamespace(
        config=RLConfig(), tokenizer=Words(), roles={}, rank=0, world=1, engine_devices=None, image_processor=None
    )
    rollout: Any = RolloutWorker(context, engine)
    samples = [Sample(uid, [number], None, "x") for uid, number in (("b", 5), ("a", 7), ("c", 9), ("b", 5))]
    sampling = SamplingParams(max_tokens=6, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop=("x",))
    greedy: Any = asyncio.run(answer_greedily(rollout, samples, sampling))
    greedy = greedy.updated(asyncio.run(Work().score(greedy, training=True)))
    assert len(engine.requests) == 3
    assert {request.sampling for request in engine.requests} == {
        SamplingParams(max_tokens=6, temperature=0.0, stop=("x",))
    }
    rows = Batch({"uid": ["b", "a", "b", "a", "c"]})
    assert baselines(rows, greedy).tolist() == [5, 7, 5, 7, 9]
