"""What every estimator refuses, with the row, the key and the remedy in the message."""

import math

import pytest
import torch
from support.advantage_cases import Call, call
from support.messages import raises

from hone.algorithms import advantage_estimators
from hone.algorithms.advantages import INPUTS
from hone.errors import ConfigError

NAMES = advantage_estimators.names()
KEYS = {
    "group_ids": "rollout.n",
    "values": "critic.enable=true",
    "process_rewards": "algorithm.adv_estimator=prime",
    "reward_baselines": "algorithm.adv_estimator=remax",
    "old_log_probs": "algorithm.rollout_correction",
    "sum_pi_squared": "actor_rollout_ref.actor.calculate_sum_pi_squared=true",
    "reward_components": "algorithm.gdpo_reward_keys",
    "turn_ids": "agent loop that records turns",
    "turn_values": "algorithm.adv_estimator=turn_value_by_forks",
    "turn_baselines": "algorithm.adv_estimator=rae",
    "turn_roles": "agent loop that records roles",
}


def batch() -> Call:
    return call(0, 8, 6, holes=False, equal=False, least_group=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_input_names_the_column_and_the_key(name: str) -> None:
    estimator = advantage_estimators.get(name)
    for need in estimator.needs:
        made = batch()
        column = INPUTS[need][0]
        del made.inputs[column]
        with raises(ConfigError, f"'{estimator.name}'", column, KEYS[column]):
            made.run(estimator)
    with raises(ConfigError, "'gama'", where="algorithm"):
        batch().run(estimator, gama=1.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_reward_that_is_not_a_number_names_its_rows(name: str, wrong: float) -> None:
    made = batch()
    row = int(made.mask.sum(1).argmax())
    made.rewards[row, 0] = wrong
    with raises(ConfigError, "1 of 8 rows", row, where="token_level_rewards"):
        made.run(advantage_estimators.get(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_that_selects_nothing(name: str) -> None:
    made = batch()
    made.mask = torch.zeros_like(made.mask)
    with raises(ConfigError, "8 x 6", where="response_mask"):
        made.run(advantage_estimators.get(name))


@pytest.mark.parametrize("name", NAMES)
def test_shapes_that_do_not_match(name: str) -> None:
    estimator = advantage_estimators.get(name)
    for need in estimator.needs | estimator.uses:
        made = batch()
        column = INPUTS[need][0]
        value = made.inputs[column] if made.inputs[column] is not None else torch.ones(8, 6)
        made.inputs[column] = {k: v[1:] for k, v in value.items()} if isinstance(value, dict) else value[1:]
        with raises(ConfigError, column):
            made.run(estimator)
    made = batch()
    made.mask = made.mask[:, 1:]
    with raises(ConfigError, "response_mask", "[8, 5]", "[8, 6]"):
        made.run(estimator)


def test_large_finite_rewards_are_not_infinite() -> None:
    """Their sum overflows float32; each is a number, and so is the score."""
    rewards = torch.full((2, 2), 3e38)
    rewards[1] = 0
    advantages, _ = advantage_estimators.get("rloo")(rewards.double(), torch.ones(2, 2), group_ids=["a", "a"])
    assert torch.isfinite(advantages).all()
    with raises(ConfigError, "2 of 2 rows: 0, 1", where="token_level_rewards"):
        advantage_estimators.get("rloo")(rewards * math.inf, torch.ones(2, 2), group_ids=["a", "a"])


def test_a_component_or_a_baseline_that_is_not_a_number() -> None:
    made = batch()
    made.mask[2] = 0
    for column, estimator in (("reward_baselines", "remax"), ("reward_components", "gdpo")):
        value = made.inputs[column]
        scores = value if isinstance(value, torch.Tensor) else value["right"]
        scores[2] = math.nan  # no token of this row is selected
        made.run(advantage_estimators.get(estimator))
        made.mask[1, 0] = 1
        made.rewards[1, 0] = 0.0
        scores[1] = math.nan
        with raises(ConfigError, column, "1 of 8 rows: 1"):
            made.run(advantage_estimators.get(estimator))


def test_pass_at_k_refuses_a_group_of_one() -> None:
    rewards, mask = torch.randn(3, 2), torch.ones(3, 2)
    passk = advantage_estimators.get("grpo_passk")
    with raises(ConfigError, "1 of 2", "fewer than 2", "'b'", "actor_rollout_ref.rollout.n=8"):
        passk(rewards, mask, group_ids=["a", "a", "b"])
    # a group whose other responses are masked out is not a mistake of the user
    mask[1] = 0
    assert not passk(rewards[:2], mask[:2], group_ids=["a", "a"])[0].any()


def test_wrong_components_weights_counts_and_turns() -> None:
    gdpo, gpg, gigpo = map(advantage_estimators.get, ("gdpo", "gpg", "gigpo"))
    with raises(ConfigError, "'rigth'", "Did you mean right?"):
        batch().run(gdpo, gdpo_reward_keys=["rigth"])
    with raises(ConfigError, "3 entries", "2 components", "algorithm.gdpo_reward_weights=[1.0, 1.0]"):
        batch().run(gdpo, gdpo_reward_weights=[1, 2, 3])
    made = batch()
    made.inputs["reward_components"] = {}
    with raises(ConfigError, "gdpo", 0):
        made.run(gdpo)
    with raises(ConfigError, "'score'", where="algorithm.gpg_count"):
        batch().run(gpg, gpg_count="score")
    made = batch()
    row = int(made.mask.sum(1).argmax())
    made.inputs["turn_ids"][row, 0] = -1
    with raises(ConfigError, "turn_ids", f"row {row}"):
        made.run(gigpo)
    made.inputs["turn_baselines"] = [[]] * 8
    with raises(ConfigError, "turn_ids", f"row {row}"):
        made.run(advantage_estimators.get("rae"))
    made = batch()
    made.inputs["turn_baselines"] = [[]] * 8
    with raises(ConfigError, "turn_baselines", "0 turns"):
        made.run(advantage_estimators.get("rae"))
    made.inputs["turn_baselines"] = [[]] * 7
    with raises(ConfigError, "7 rows for 8"):
        made.run(advantage_estimators.get("rae"))
    made = batch()
    made.inputs["turn_roles"] = [[]] * 8
    with raises(ConfigError, "turn_roles", "0 turns"):
        made.run(advantage_estimators.get("hierarchical_grpo"))
    made = batch()
    made.inputs["turn_group_ids"] = [["x"]] * 8
    with raises(ConfigError, "turn_group_ids", "1 states"):
        made.run(gigpo)


def test_unknown_estimator_names_the_nearest() -> None:
    with raises(ConfigError, "grpo"):
        advantage_estimators.get("gpro")
