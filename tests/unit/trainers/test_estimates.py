"""Every estimator gets what it needs from the columns of a batch; what is missing is said; a function of one's own is one."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from support.messages import raises

from hone.algorithms import advantage_estimators
from hone.algorithms.advantages.base import INPUTS
from hone.algorithms.advantages.roles import RoleBaselines
from hone.config.algorithm import AlgorithmConfig
from hone.data.batch import Batch, to_batch
from hone.data.episode_log import EpisodeLog
from hone.data.ragged import Ragged
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import ConfigError
from hone.rewards.score import Score
from hone.trainers.estimates import (
    COLUMNS,
    estimate,
    estimator_options,
    needed_columns,
    reward_components,
    suppliers,
    turn_baselines,
    turn_ids,
    turn_states,
)

MASKS = [[1, 1, 0, 0, 1], [1, 1, 1], [1, 0, 1], [1, 1]]


def batch() -> Batch:
    """Two prompts, two responses each, some with what an environment said in between."""
    rows = []
    for row, mask in enumerate(MASKS):
        sample = Sample(uid=f"p{row // 2}", prompt_ids=[1, 2], messages=None, data_source="x")
        ids = list(range(10, 10 + len(mask)))
        rows.append(
            Trajectory(
                sample.uid,
                row % 2,
                [1, 2],
                ids,
                mask,
                [-0.5] * len(mask),
                [-0.5] * len(mask),
                "",
                StopReason.STOP,
                sample,
            )
        )
    made = to_batch(rows)
    mask = made.ragged("response_mask")
    values = mask.with_values(torch.linspace(-1, 1, len(mask.values)))
    totals = torch.tensor([1.0, 0.0, 0.25, 0.75])
    rewards = mask.with_values(torch.zeros(len(mask.values)))
    rewards.values[mask.offsets[1:] - 1] = totals
    return made.with_columns(
        token_level_rewards=rewards,
        reward=totals,
        reward_baselines=totals / 2,
        values=values,
        process_rewards=values.with_values(values.values / 3),
        old_log_probs=values.with_values(values.values - 2),
        sum_pi_squared=values.with_values(values.values.abs()),
        rollout_is_weights=values.with_values(values.values.abs() + 0.5),
        turn_values=[{1: 0.5}] * len(rows),
        turn_baselines=[[("x", 0.5)] * 3] * len(rows),
        score=[
            Score(float(total), terms={"acc": float(total > 0.5), "form": 1.0 - row % 2})
            for row, total in enumerate(totals)
        ],
    )


def config(**changes) -> AlgorithmConfig:
    return AlgorithmConfig(**{"gdpo_reward_keys": ["acc", "form"], **changes})


@pytest.mark.parametrize("name", advantage_estimators.names())
def test_every_registered_estimator_can_be_run_by_the_trainer(name: str) -> None:
    estimator, rows = advantage_estimators.get(name), batch()
    assert all(column in rows for column in needed_columns(estimator))
    advantages, returns = estimate(estimator, rows, config(adv_estimator=name))
    mask = rows.ragged("response_mask")
    for found in (advantages, returns):
        assert torch.equal(found.offsets, mask.offsets)
        assert torch.isfinite(found.values).all() and (found.values[mask.values == 0] == 0).all()
    assert advantages.values.abs().sum() > 0


def test_what_an_estimator_may_take_has_a_column() -> None:
    assert COLUMNS.keys() == INPUTS.keys()


@pytest.mark.parametrize("name", advantage_estimators.names())
def test_what_is_missing_has_a_supplier(name: str) -> None:
    estimator = advantage_estimators.get(name)
    own = estimator.needs - {"groups", "old_log_probs"}
    assert bool(suppliers(estimator)) == bool(own)


def test_inputs_reach_the_estimator_as_they_are() -> None:
    seen = {}
    estimator = advantage_estimators.get("gigpo")
    rows = batch()

    def spy(token_level_rewards, response_mask, **arguments):
        seen.update(arguments, rewards=token_level_rewards)
        return estimator.compute(token_level_rewards, response_mask, **arguments)

    import dataclasses

    estimate(dataclasses.replace(estimator, compute=spy), rows, config())
    assert seen["group_ids"] == ["p0", "p0", "p1", "p1"]
    assert seen["turn_ids"].tolist()[0] == [0, 0, 0, 0, 1]
    assert seen["turn_group_ids"][0] == [("p0",), ("p0", 12, 13)]
    assert seen["gamma"] == 1.0 and "lam" not in seen


def test_options_come_from_the_keys_of_their_names_and_adv_kwargs_wins() -> None:
    grpo = advantage_estimators.get("grpo")
    assert estimator_options(grpo, config(norm_adv_by_std_in_grpo=False)) == {"norm_adv_by_std_in_grpo": False}
    changed = estimator_options(grpo, config(adv_kwargs={"epsilon": 0.1, "norm_adv_by_std_in_grpo": False}))
    assert changed == {"norm_adv_by_std_in_grpo": False, "epsilon": 0.1}


def test_turns_are_runs_of_sampled_tokens() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1], [0] * 8, [1] * 8])
    assert turn_ids(mask).tolist()[0] == [0, 0, 0, 0, 1, 1, 1, 2]
    assert turn_ids(mask).tolist()[2] == [0] * 8
    for row in batch().objects("trajectory"):
        assert len(turn_states(row)) == int(turn_ids(torch.tensor([row.response_mask])).max()) + 1


def test_reward_components() -> None:
    scores = [
        Score(1.0, terms={"acc": 1.0, "some": 1.0}),
        Score(0.2, terms={"acc": 0.0}, unshaped=0.5),
        Score(0.0, error="raised"),
    ]
    found = reward_components(scores, ["acc", "score"])
    assert {name: values.tolist() for name, values in found.items()} == {"acc": [1, 0, 0], "score": [1, 0.5, 0]}
    with raises(ConfigError, "2 of 3", "format", where="algorithm.gdpo_reward_keys") as caught:
        reward_components(scores, ["format"])
    assert "algorithm.gdpo_reward_keys=[acc,score]," in caught.value.fix  # without those that some scores lack
    with raises(ConfigError, "algorithm.gdpo_reward_keys=[acc,score]"):
        reward_components(scores, [])


OWN = '''
import torch

def best_of(token_level_rewards, response_mask, *, group_ids, old_log_probs=None, bonus=1.0):
    """Reward plus a bonus."""
    assert old_log_probs is not None
    advantages = (token_level_rewards.sum(-1, keepdim=True) + bonus) * response_mask
    return advantages, advantages

class Thing:
    pass
'''


def test_a_custom_estimator_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_estimates.py").write_text(OWN)
    estimator = advantage_estimators.get("own_estimates:best_of")
    assert (estimator.needs, estimator.uses, estimator.options) == ({"groups"}, {"old_log_probs"}, {"bonus"})
    assert estimator.formula == "Reward plus a bonus."
    advantages, _ = estimate(estimator, batch(), config(adv_kwargs={"bonus": 2.0}))
    assert advantages.to_lists()[1] == [2.0, 2.0, 2.0]
    with raises(ConfigError, "own_estimates:Thing"):
        advantage_estimators.get("own_estimates:Thing")
    assert isinstance(advantages, Ragged)


def test_averages_of_roles_are_those_of_a_plain_loop() -> None:
    """Games of two seats whose conversations are two rows, between episodes of one row without roles."""
    draw = random.Random(3)
    rows, rewards = [], []
    for game in range(12):
        sample = Sample(f"p{game}", [1, 2], None, "environment/x", "7")
        sizes = [draw.randint(1, 3), draw.randint(1, 3)] if game % 3 else [draw.randint(1, 4)]
        roles = [f"x/{seat}" for seat, size in enumerate(sizes) for _ in range(size)] if len(sizes) > 1 else []
        log = EpisodeLog(turn_roles=roles, assistant_turns=sum(sizes))
        for part, size in enumerate(sizes):
            mask = [1, 1, 0] * (size - 1) + [1, 1]
            ids, zeros = [5] * len(mask), [0.0] * len(mask)
            rewards.append([draw.choice([-1.0, 0.5, 2.0]) * m for m in mask])
            rows.append(
                Trajectory(
                    f"p{game}", 0, [1, 2], ids, mask, zeros, zeros, "", StopReason.STOP, sample, part=part, episode=log
                )
            )
    batch = to_batch(rows)
    batch = batch.with_columns(token_level_rewards=Ragged.from_rows(rewards, torch.float64))
    averages = RoleBaselines(0.8)
    column = turn_baselines(batch, averages)
    advantages, returns = estimate(
        advantage_estimators.get("rae"), batch.with_columns(turn_baselines=column), config(adv_estimator="rae")
    )
    values: dict[str, float] = {}
    for game in range(12):
        own = [n for n, t in enumerate(rows) if t.uid == f"p{game}"]
        names = [f"x/{seat}" for seat in range(2)] if len(own) > 1 else ["environment/x"]
        for name, n in zip(names, own, strict=True):
            earned = sum(rewards[n])
            values[name] = 0.8 * values.get(name, 0.0) + 0.2 * earned
            mask = rows[n].response_mask
            expected = [(earned - values[name]) * m for m in mask]
            assert advantages.row(n).tolist() == pytest.approx(expected)
            assert returns.row(n).tolist() == pytest.approx([earned * m for m in mask])
    assert averages.values == pytest.approx(values) and set(values) == {"x/0", "x/1", "environment/x"}
