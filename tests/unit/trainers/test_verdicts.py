"""Responses without a verdict: left out alone, and no estimate changes its expectation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from hone.algorithms import advantage_estimators
from hone.config.algorithm import AlgorithmConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.rewards.score import Score
from hone.rewards.worker import FEWEST, LATEST, NoVerdictRate
from hone.trainers.batch_ops import sort_rows
from hone.trainers.estimates import estimate

N, CHANCES, REWARDS, LOST = 4, (0.5, 0.3, 0.2), (1.0, 0.0, 0.25), 0.3
"""A bandit of three actions: responses per prompt, probability and reward of each action, share of lost verdicts."""
PLAIN = {"grpo": {"norm_adv_by_std_in_grpo": False}}
GROUPED = ("grpo", "rloo", "opo", "gpg", "maxrl", "reinforce_plus_plus_baseline")


def group(actions: tuple[int, ...], verdicts: tuple[int, ...], uid: str = "a") -> Batch:
    rewards = [REWARDS[action] if verdict else math.nan for action, verdict in zip(actions, verdicts, strict=True)]
    return Batch(
        {
            "response_mask": Ragged.from_rows([[1]] * len(actions), torch.int64),
            "token_level_rewards": Ragged.from_rows([[reward] for reward in rewards], torch.float32),
            "uid": [uid] * len(actions),
            "part": torch.zeros(len(actions), dtype=torch.int64),
            "verdict": torch.tensor(verdicts, dtype=torch.int64),
            "score": [Score(reward) for reward in rewards],
        }
    )


def mean_gradient(batch: Batch, actions: list[int], name: str) -> list[float]:
    """The policy gradient's estimate with respect to the logits, averaged over the responses."""
    options = PLAIN.get(name, {})
    advantages, _ = estimate(advantage_estimators.get(name), batch, AlgorithmConfig(**options))
    gradient = [0.0] * len(CHANCES)
    for advantage, action in zip(advantages.values.tolist(), actions, strict=True):
        for logit, chance in enumerate(CHANCES):
            gradient[logit] += advantage * ((logit == action) - chance) / len(actions)
    return gradient


def plays(count: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    for actions in itertools.product(range(len(CHANCES)), repeat=count):
        yield math.prod(CHANCES[action] for action in actions), actions


def expected(name: str, count: int) -> list[float]:
    """Exact expectation of the estimate from ``count`` responses."""
    sums = [0.0] * len(CHANCES)
    for chance, actions in plays(count):
        for logit, value in enumerate(mean_gradient(group(actions, (1,) * count), list(actions), name)):
            sums[logit] += chance * value
    return sums


ABOUT = pytest.mark.application("hone/algorithms", "hone/trainers")


@pytest.mark.parametrize(
    "name", [name if name in ("grpo", "rloo") else pytest.param(name, marks=ABOUT) for name in GROUPED]
)
def test_lost_verdicts_leave_the_expectation_of_fewer_responses(name: str) -> None:
    sums, by_count = [0.0] * len(CHANCES), [0.0] * (N + 1)
    for verdicts in itertools.product((0, 1), repeat=N):
        lost = math.prod(1 - LOST if verdict else LOST for verdict in verdicts)
        kept = sum(verdicts)
        if kept < 2:  # the group is replaced by another one
            continue
        by_count[kept] += lost
        for chance, actions in plays(N):
            batch = group(actions, verdicts)
            rows, without, small = sort_rows(batch, 2)
            assert (len(rows), len(without), small) == (kept, N - kept, [])
            gradient = mean_gradient(batch.reorder(rows), [actions[row] for row in rows], name)
            for logit, value in enumerate(gradient):
                sums[logit] += lost * chance * value
    total = sum(by_count)
    mixture = [0.0] * len(CHANCES)
    for count, share in enumerate(by_count):
        for logit, value in enumerate(expected(name, count) if share else ()):
            mixture[logit] += share / total * value
    assert [value / total for value in sums] == pytest.approx(mixture, abs=1e-6)


def test_rloo_stays_unbiased_and_counting_zero_is_not() -> None:
    mean = sum(chance * reward for chance, reward in zip(CHANCES, REWARDS, strict=True))
    true = [chance * (reward - mean) for chance, reward in zip(CHANCES, REWARDS, strict=True)]
    for count in range(2, N + 1):
        assert expected("rloo", count) == pytest.approx(true, abs=1e-6)
    as_zero = [0.0] * len(CHANCES)
    for chance, actions in plays(2):
        for verdicts in itertools.product((0, 1), repeat=2):
            lost = math.prod(1 - LOST if verdict else LOST for verdict in verdicts)
            batch = group(actions, verdicts)
            zeros = Ragged.from_rows(
                [[v] for v in batch.ragged("token_level_rewards").values.nan_to_num()], torch.float32
            )
            for logit, value in enumerate(
                mean_gradient(batch.with_columns(token_level_rewards=zeros), list(actions), "rloo")
            ):
                as_zero[logit] += lost * chance * value
    assert as_zero == pytest.approx([(1 - LOST) * value for value in true], abs=1e-6), (
        "shrunk by the share of lost verdicts"
    )


def test_an_episode_of_several_segments_is_one_verdict() -> None:
    batch = Batch(
        {
            "uid": ["a", "a", "a", "b", "b"],
            "part": torch.tensor([0, 1, 0, 0, 0]),
            "verdict": torch.tensor([1, 1, 0, 1, 1]),
        }
    )
    assert sort_rows(batch, 2) == ([0, 1, 3, 4], [2], ["a"])
    assert sort_rows(batch, 1)[2] == []


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), max_size=12), st.floats(0, 1))
@examples(200)
def test_the_rate_is_of_the_latest_responses(calls: list[tuple[int, float]], limit: float) -> None:
    rate, seen = NoVerdictRate(limit), []
    for count, share in calls:
        missing = int(share * count)
        seen.append((missing, count))
        window = next(
            seen[start:] for start in range(len(seen)) if sum(c for _, c in seen[start:]) <= max(LATEST, count)
        )
        responses, lost = sum(c for _, c in window), sum(m for m, _ in window)
        largest = int(limit * max(responses, FEWEST if limit else 0) + 1e-9)
        assert rate.add(missing, count) == (lost > largest and missing > 0), window
        assert rate.counted == responses


def test_a_rate_of_zero_tolerates_none_and_one_tolerates_all() -> None:
    assert NoVerdictRate(0.0).add(1, 100)
    assert not NoVerdictRate(1.0).add(100, 100)
