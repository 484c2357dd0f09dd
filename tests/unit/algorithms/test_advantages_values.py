"""Numbers that can be checked by hand, identities, and the parts that estimators share."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises

from hone.algorithms import advantage_estimators, masked_mean
from hone.algorithms.advantages import Groups, Turns, turn_returns
from hone.algorithms.advantages.base import whiten_
from hone.algorithms.advantages.scan import BLOCK, Packing, suffix_sums
from hone.errors import ConfigError


def of(name: str, scores: list[float], groups: str, lengths: list[int] | None = None, **arguments) -> list[float]:
    """The advantage on the first token of each response."""
    lengths = lengths or [2] * len(scores)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[range(len(scores)), [n - 1 for n in lengths]] = torch.tensor(scores, dtype=torch.float64)
    return advantage_estimators.get(name)(rewards, mask, group_ids=list(groups), **arguments)[0][:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("maxrl", [3, -1, -1, -1]),
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("grpo_passk", [2, 0, 0, 0]),
        ("opo", [0.75, -0.25, -0.25, -0.25]),
        ("gpg", [3, -1, -1, -1]),
    ],
)
def test_one_success_in_four(name: str, expected: list[float]) -> None:
    assert of(name, [1, 0, 0, 0], "aaaa") == pytest.approx(expected, rel=1e-5)
    assert of(name, [0, 0, 0, 0], "aaaa") == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "maxrl"])
def test_a_response_without_others_keeps_its_score(name: str) -> None:
    """Also when the others of its group have no sampled token: they are no members."""
    assert of(name, [2, 1], "ab") == pytest.approx([2, 1], rel=1e-5)
    estimator, rewards = advantage_estimators.get(name), torch.tensor([[0.0, 2.0], [1.0, 1.0]])
    advantages, _ = estimator(rewards, torch.tensor([[1, 1], [0, 0]]), group_ids=["a", "a"])
    assert advantages.tolist() == [pytest.approx([2.0, 2.0], rel=1e-5), [0, 0]]


def test_worked_numbers() -> None:
    # 30 tokens of score 1 and 10 of score 0: the length-weighted mean is 0.75
    assert of("opo", [1, 0], "aa", [3, 1]) == pytest.approx([0.25, -0.75])
    # one of the four responses disagrees with nobody: the paper scales by 4/2, verl by 4/3
    scores = [1.0, 0.0, 1.0, 1.0]
    assert of("gpg", scores, "aabb", gpg_count="advantages") == pytest.approx([1, -1, 0, 0])
    assert of("gpg", scores, "aabb") == pytest.approx([4 / 6, -4 / 6, 0, 0])
    assert of("grpo_passk", [3, 5, 1], "aaa", norm_adv_by_std_in_grpo=False) == [0, 2, 0]
    assert of("grpo_passk", [5, 5, 1], "aaa", norm_adv_by_std_in_grpo=False) == [0, 0, 0]
    # negative scores turn nothing round: the better one is better
    assert of("maxrl", [-1, -3], "aa") == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize("name", ["grpo_vectorized", "rloo_vectorized", "tir_optimal_token_baseline"])
def test_the_other_names_are_the_same_estimator(name: str) -> None:
    plain = name.removesuffix("_vectorized").removeprefix("tir_")
    assert advantage_estimators.get(name) is advantage_estimators.get(plain)


def test_equal_scores_have_exactly_no_advantage() -> None:
    """Rewards such as 0.1 are not representable: their mean must not differ from them by a rounding error."""
    rewards = torch.zeros(8, 3)
    rewards[:4, 2], rewards[:4, 0] = 0.1, 0.2
    rewards[4:, 0], rewards[4:, 1] = 0.1, 0.2
    advantages, _ = advantage_estimators.get("grpo")(rewards, torch.ones(8, 3), group_ids=["a"] * 8)
    assert advantages.abs().max() < 1e-6


def test_group_ids_as_a_tensor_as_numbers_and_of_wrong_length() -> None:
    rewards, mask = torch.randn(4, 3), torch.ones(4, 3)
    grpo = advantage_estimators.get("grpo")
    expected = grpo(rewards, mask, group_ids=list("aabb"))[0]
    for ids in (torch.tensor([7, 7, 1, 1]), [(0, 1), (0, 1), (2,), (2,)]):
        assert torch.equal(grpo(rewards, mask, group_ids=ids)[0], expected)
    with raises(ConfigError, "3 entries", "4 sequences"):
        grpo(rewards, mask, group_ids=list("aab"))


def test_gae_identities() -> None:
    """With gamma = lam = 1 the return of every token is the reward still to come; advantages are whitened."""
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 6, 10, dtype=torch.float64)
    mask = torch.rand(6, 10) < 0.7
    advantages, returns = advantage_estimators.get("gae")(rewards, mask, values=values)
    torch.testing.assert_close(returns, (rewards * mask).flip(1).cumsum(1).flip(1) * mask)
    assert abs(float(masked_mean(advantages, mask))) < 1e-9
    assert abs(float(advantages[mask].var()) - 1) < 1e-6


def test_optimal_token_baseline_of_equal_weights_is_the_group_mean() -> None:
    """Two responses of equal length and equal gradients: the baseline at each token is the mean of the returns."""
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.0]])
    same = torch.full((2, 2), -1.0)
    estimator = advantage_estimators.get("optimal_token_baseline")
    advantages, returns = estimator(
        rewards, torch.ones(2, 2), group_ids=["a", "a"], old_log_probs=same, sum_pi_squared=same * 0
    )
    torch.testing.assert_close(advantages, returns - returns.mean(dim=0))


def test_gigpo_compares_turns_from_one_state() -> None:
    """Both responses start in one state; the second turns start in states that occur once."""
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    advantages, _ = advantage_estimators.get("gigpo")(
        rewards,
        torch.ones(2, 2),
        group_ids=["a", "a"],
        turn_ids=torch.tensor([[0, 1], [0, 1]]),
        turn_group_ids=[["start", "left"], ["start", "right"]],
        gamma=0.5,
        norm_adv_by_std_in_grpo=False,
    )
    # whole responses: +-0.5; first turns: 0.5 and 0 to come, +-0.25
    torch.testing.assert_close(advantages, torch.tensor([[0.75, 0.5], [-0.75, -0.5]]))


# -------------------------------------------------------------------------------------------------------- shared parts


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, BLOCK * BLOCK + 7])
@pytest.mark.parametrize("decay", [1.0, 0.97, 0.3, 0.0])
def test_blocked_suffix_sums_equal_the_recursion(length: int, decay: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, length, dtype=torch.float64)
    expected, running = torch.zeros_like(values), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(length)):
        expected[:, t] = running = values[:, t] + decay * running
    torch.testing.assert_close(suffix_sums(values, decay), expected, rtol=1e-12, atol=1e-12)


@examples(40)
@given(
    rows=st.integers(1, 5), columns=st.integers(1, 9), share=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 99)
)
def test_packing_there_and_back(rows: int, columns: int, share: float, seed: int) -> None:
    torch.manual_seed(seed)
    mask = torch.rand(rows, columns) < share
    values = torch.where(mask, torch.randn(rows, columns), math.nan)
    packing, back = Packing(mask), torch.full((rows, columns), math.nan)
    packed = packing.pack(values)
    assert [row[:n].tolist() for row, n in zip(packed, mask.sum(1), strict=True)] == [
        values[i][mask[i]].double().tolist() for i in range(rows)
    ]
    assert packed.count_nonzero() == mask.sum()
    packing.unpack_into(back, packed)
    assert torch.equal(back, values.nan_to_num(0.0))


def test_whitening_in_place_equals_the_masked_one() -> None:
    torch.manual_seed(0)
    mask = torch.rand(300, 7) < 0.5
    values = torch.randn(300, 7) * mask + 3 * mask
    chosen = values[mask]
    expected = torch.where(mask, (values - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8), 0.0)
    torch.testing.assert_close(whiten_(values.clone(), mask), expected, rtol=1e-5, atol=1e-5)
    equal = torch.full((300, 7), 2.0608) * mask
    assert not whiten_(equal, mask).any()
    alone = torch.zeros(2, 2, dtype=torch.bool)
    alone[0, 0] = True
    assert not whiten_(alone * 3.0, alone).any()


def test_best_two_of_a_group() -> None:
    groups = Groups.from_ids(list("aaabc"), torch.tensor([[1], [1], [1], [1], [0]]))
    best, second, first = groups.best_two(torch.tensor([2.0, 5.0, 5.0, 1.0, 9.0]))
    assert best.tolist() == [5, 5, 5, 1, -math.inf]
    assert second.tolist() == [5, 5, 5, -math.inf, -math.inf]
    assert first.tolist() == [False, True, False, True, False]


# --------------------------------------------------------------------------------------------------------------- turns

MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
TURNS = torch.tensor([[0, 0, -1, 2, 9], [0, 0, 0, 0, 0]])


def test_values_of_turns_are_placed_on_their_last_tokens() -> None:
    placed = Turns.from_ids(TURNS, MASK).place(torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 5.0]]))
    assert placed.tolist() == [[0, 1, 0, 2, 0], [0] * 5]


def test_rewards_are_added_up_and_discounted_by_turn() -> None:
    placed = torch.tensor([[1.0, 1.0, math.nan, 3.0, 0.0], [math.nan] * 5])
    rewards = Turns.from_ids(TURNS, MASK).sum(placed)
    assert rewards.tolist() == [[2, 0, 3], [0, 0, 0]]
    # turn 1 was not sampled: it is not a step, and is not discounted
    present = torch.tensor([[True, False, True], [False] * 3])
    assert turn_returns(rewards, present, gamma=0.5).tolist() == [[3.5, 0, 3], [0, 0, 0]]
