"""An episode that left several parts counts as the same episode in one piece, whatever the estimator."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from hone.algorithms import advantage_estimators
from hone.config.algorithm import AlgorithmConfig
from hone.data.batch import Batch, to_batch
from hone.data.episode_log import EpisodeLog
from hone.data.ragged import Ragged
from hone.data.types import Sample, StopReason, Trajectory
from hone.rewards.manager import episode_lengths, share_rewards, token_rewards
from hone.rewards.score import Score
from hone.trainers.estimates import COLUMNS, estimate, join_segments
from hone.trainers.reporting import episode_sums, first_segments
from hone.trainers.validation import evaluate_answers

COLUMNS_OF_TOKENS = (
    "token_level_rewards",
    "values",
    "process_rewards",
    "old_log_probs",
    "sum_pi_squared",
    "rollout_is_weights",
    "entropy",
)
BY_ROW = ("score", "reward_baselines", "turn_values", "turn_baselines")
NAMES = sorted({advantage_estimators.get(name).name for name in advantage_estimators.names()})


def trajectory(uid: str, index: int, turns: list[tuple[int, int]], part: int = 0) -> Trajectory:
    """Turns of (tokens given before it, tokens sampled); the first has none given."""
    mask = [own for given_, sampled in turns for own in [0] * given_ + [1] * sampled]
    sample, zeros = Sample(uid, [1, 2], None, "x"), [0.0] * len(mask)
    log = EpisodeLog(turn_rewards=[0.0] * 9, assistant_turns=2, turn_roles=["even", "odd#0", "even", "odd#1"])
    return Trajectory(uid, index, [1, 2], [3] * len(mask), mask, zeros, zeros, "", StopReason.STOP, sample, episode=log, part=part)  # fmt: skip


@st.composite
def episodes(draw):
    """Two groups of 2 to 3 episodes, each a list of turns, and after which turns each is cut."""
    found = []
    for uid in ("a", "b"):
        for index in range(draw(st.integers(2, 3))):
            count = draw(st.integers(1, 4))
            turns = [(draw(st.integers(1, 3)) if turn else 0, draw(st.integers(1, 3))) for turn in range(count)]
            found.append((uid, index, turns, [draw(st.booleans()) for _ in turns[1:]]))
    return found


def columns_of(batch: Batch, sampled: list[dict[str, float]]) -> Batch:
    """Fill the columns of tokens from values of the sampled tokens, in order."""
    mask, taken = batch.ragged("response_mask"), iter(sampled)
    rows = [next(taken) if own else None for own in mask.values.tolist()]
    made = {
        name: mask.with_values(torch.tensor([row[name] if row else 0.0 for row in rows])) for name in COLUMNS_OF_TOKENS
    }
    return batch.with_columns(**made)


def both_ways(found, seed: int, *, roles: bool = False) -> tuple[Batch, Batch]:
    """The batch of whole episodes, and that of the same episodes cut into parts."""
    whole, split = [], []
    for uid, index, turns, cuts in found:
        whole.append(trajectory(uid, index, turns))
        parts = [[turns[0]]]
        for turn, cut in zip(turns[1:], cuts, strict=True):
            if cut:
                parts.append([(0, turn[1])])  # what was given stands in the new part's prompt
            else:
                parts[-1].append(turn)
        split += [trajectory(uid, index, part, number) for number, part in enumerate(parts)]
    count = sum(sum(t.response_mask) for t in whole)
    draw = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(count, generator=draw).abs().clamp(0.01, 0.99).tolist() for name in COLUMNS_OF_TOKENS}
    values["old_log_probs"] = [-value for value in values["old_log_probs"]]
    tokens = [{name: values[name][n] for name in COLUMNS_OF_TOKENS} for n in range(count)]
    made = []
    for rows in (whole, split):
        batch = columns_of(to_batch(rows), tokens)
        named = {(t.uid, t.index): float(n) for n, t in enumerate(whole)}
        score = [Score(named[t.uid, t.index], {"acc": named[t.uid, t.index] % 2}) for t in rows]
        made.append(
            batch.with_columns(
                score=score,
                reward_baselines=torch.full((len(rows),), 0.5),
                turn_values=[{1: named[t.uid, t.index] / 3} for t in rows],
                turn_baselines=[[("even", 0.1), ("odd", named[t.uid, t.index])] * 20 for t in rows],
            ).select(*(name for name in (*batch.names(), *BY_ROW) if roles or name != "trajectory"))
        )
    return made[0], made[1]


@pytest.mark.parametrize("name", NAMES)
@examples(15)
@given(found=episodes(), seed=st.integers(0, 99), share=st.sampled_from([None, 0.3]))
def test_advantages_are_those_of_the_episode_in_one_piece(name: str, found, seed: int, share: float | None) -> None:
    estimator = advantage_estimators.get(name)
    config = AlgorithmConfig(gamma=0.9, lam=0.8, gdpo_reward_keys=["acc", "score"], top_entropy_share=share)
    whole, split = both_ways(found, seed, roles="turn_roles" in estimator.needs)
    for one, other in zip(estimate(estimator, whole, config), estimate(estimator, split, config), strict=True):
        mine, theirs = (
            column.values[batch.ragged("response_mask").values.bool()]
            for column, batch in ((one, whole), (other, split))
        )
        torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-6)
    assert other.lengths.tolist() == split.ragged("response_mask").lengths.tolist()


def test_without_it_an_episode_of_three_parts_counted_three_times() -> None:
    found = [("a", 0, [(0, 1), (1, 1), (1, 1)], [True, True]), ("a", 1, [(0, 1)], [])]
    whole, split = both_ways(found, 1)
    one, _ = estimate(advantage_estimators.get("grpo"), whole, AlgorithmConfig())
    assert join_segments(split, {"uid"}).objects("uid") == ["a", "a"] and len(split) == 4
    parts, _ = estimate(advantage_estimators.get("grpo"), split, AlgorithmConfig())
    assert parts.values[0] == pytest.approx(float(one.values[0])) and parts.values[-1] == pytest.approx(
        float(one.values[-1])
    )
    assert parts.values[0] + parts.values[-1] == pytest.approx(0.0), "two episodes, as far above their mean as below"


def part(mask: list[int], number: int, earned: list[float], index: int = 0) -> Trajectory:
    made = dataclasses.replace(
        trajectory("a", index, [(0, 1)], number), response_mask=mask, response_ids=[3] * len(mask)
    )
    made.episode = EpisodeLog(turn_rewards=earned)
    return made


def test_every_part_has_the_score_of_the_episode_and_its_tokens_bear_it_once() -> None:
    earned = [0.5, 0.0, 0.25]
    rows = [part([1, 1], 0, earned), part([1, 0, 1], 1, earned), part([1], 0, [0.0], index=1)]
    said = [Score(1.5, {"acc": 1.0}, placed={1: 0.5}), Score(1.25, {"acc": 1.0}, placed={2: 0.25}), Score(0.0)]
    scores = share_rewards(rows, said)
    assert [score.total for score in scores] == [1.75, 1.75, 0.0]
    placed = [token_rewards(score, t.response_mask) for score, t in zip(scores, rows, strict=True)]
    assert placed == [{1: 0.5}, {2: 1.25}, {0: 0.0}] or placed == [{1: 0.5 + 0.0}, {2: 0.25 + 1.0}, {0: 0.0}]
    assert sum(sum(p.values()) for p in placed[:2]) == pytest.approx(1.75)
    assert scores[0].terms == {"acc": 1.0, "turn_rewards": 0.5} and said[0].total == 1.5, (
        "what was said is left as it is"
    )
    broken = share_rewards(rows, [said[0], Score(0.0, error="no answer"), said[2]])
    assert [score.error for score in broken] == ["no answer", "no answer", None]


def test_metrics_and_validation_count_an_episode_once() -> None:
    rows = [part([1, 1], 0, [0.0] * 2), part([1], 1, [0.0] * 2), part([1], 0, [0.0], index=1)]
    batch = to_batch(rows).with_columns(x=Ragged.from_rows([[1.0, 2.0], [4.0], [8.0]]))
    assert first_segments(batch) == [0, 2] and episode_sums(batch, "x").tolist() == [7.0, 8.0]
    assert episode_lengths(rows) == [3, 3, 1]
    evaluation = evaluate_answers(rows, [Score(1.0), Score(1.0), Score(0.0)], n=2)
    assert evaluation.metrics["val-core/x/reward/mean@2"] == 0.5 and len(evaluation.records()) == 3


def test_columns_that_estimators_may_take_are_all_covered() -> None:
    known = {*COLUMNS_OF_TOKENS, *BY_ROW, "uid", "response_mask", "trajectory"}
    assert {COLUMNS[name] for name in COLUMNS} <= known
