"""Every registered advantage estimator: against the oracle, and its invariances. A new registration joins by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import algorithms as oracle
from support.ragged_cases import Case, build, rows_of
from support.ragged_cases import cases as any_cases

from hone.algorithms import advantage_estimators, masked_mean
from hone.algorithms.advantages import INPUTS
from hone.errors import ConfigError

NAMES = advantage_estimators.names()
CHOICES = {"norm_adv_by_std_in_grpo": [True, False], "epsilon": [1e-6, 1e-3], "gamma": [1.0, 0.9], "lam": [1.0, 0.7]}
quick = settings(max_examples=60, deadline=None)


def cases():
    return any_cases().filter(lambda case: bool(case.mask.any()))


def inputs(case: Case) -> dict:
    return {"group_ids": case.group_ids, "values": case.values}


def run(name: str, case: Case, **options):
    return advantage_estimators.get(name)(case.rewards, case.mask, **inputs(case), **options)


def draw_options(name: str, data: st.DataObject) -> dict:
    return {o: data.draw(st.sampled_from(CHOICES[o]), label=o) for o in sorted(advantage_estimators.get(name).options)}


@pytest.mark.parametrize("name", NAMES)
@quick
@given(case=cases(), data=st.data())
def test_equals_the_oracle(name: str, case: Case, data: st.DataObject) -> None:
    options = draw_options(name, data)
    needed = {INPUTS[need][0] for need in advantage_estimators.get(name).needs}
    arguments = {k: rows_of(v) if isinstance(v, torch.Tensor) else v for k, v in inputs(case).items() if k in needed}
    expected = oracle.ESTIMATORS[name](rows_of(case.rewards), case.mask.tolist(), **arguments, **options)
    for got, want in zip(run(name, case, **options), expected, strict=True):
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_float32_and_float64_agree(name: str) -> None:
    case = build(3, 12, 20, holes=True, equal=False, gap=1.0, dtype=torch.float64)
    single = Case(case.mask, *(getattr(case, f).float() for f in case.floats()), case.group_ids)
    for got, want in zip(run(name, single), run(name, case), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(case=cases(), data=st.data())
def test_order_and_padding_change_nothing(name: str, case: Case, data: st.DataObject) -> None:
    options = draw_options(name, data)
    size, width = case.mask.shape
    expected = run(name, case, **options)
    order = data.draw(st.permutations(range(size)))
    for got, want in zip(run(name, case.select(order), **options), expected, strict=True):
        torch.testing.assert_close(got, want[order], rtol=1e-9, atol=1e-9)
    for got, want in zip(run(name, case.padded(3, 2), **options), expected, strict=True):
        torch.testing.assert_close(got[:size, :width], want, rtol=1e-9, atol=1e-9)
        assert not got[size:].any() and not got[:, width:].any()


@pytest.mark.parametrize("name", NAMES)
@quick
@given(case=cases(), data=st.data())
def test_environment_tokens_are_skipped(name: str, case: Case, data: st.DataObject) -> None:
    """Taking out the tokens with mask 0 leaves the same numbers on the others."""
    options = draw_options(name, data)
    width = max(int(case.mask.sum(1).max()), 1)

    def squeeze(x: torch.Tensor) -> torch.Tensor:
        rows = [x[i][case.mask[i].bool()] for i in range(len(x))]
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])

    dense = Case(*(squeeze(getattr(case, f)) for f in ["mask", *case.floats()]), case.group_ids)
    for got, want in zip(run(name, dense, **options), run(name, case, **options), strict=True):
        torch.testing.assert_close(got, squeeze(want), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_missing_input_unknown_option_and_description(name: str) -> None:
    case = build(0, 4, 4, holes=False, equal=False, gap=1.0, dtype=torch.float64)
    estimator = advantage_estimators.get(name)
    assert estimator.formula and estimator.paper
    assert ("groups" in estimator.needs) == bool(estimator.group_of_one)
    for need in estimator.needs:
        given_inputs = {k: v for k, v in inputs(case).items() if k != INPUTS[need][0]}
        with pytest.raises(ConfigError, match=f"needs {INPUTS[need][0]}"):
            estimator(case.rewards, case.mask, **given_inputs)
    with pytest.raises(ConfigError, match="no option 'gama'"):
        estimator(case.rewards, case.mask, **inputs(case), gama=1.0)


def test_equal_scores_have_exactly_no_advantage() -> None:
    """Rewards such as 0.1 are not representable: their mean must not differ from them by a rounding error."""
    rewards = torch.zeros(8, 3)
    rewards[:, 2] = 0.1
    rewards[:, 0] = 0.2
    advantages, _ = advantage_estimators.get("grpo")(rewards, torch.ones(8, 3), group_ids=["a"] * 8)
    assert advantages.abs().max() < 1e-6


def test_group_of_one_keeps_its_score() -> None:
    rewards, mask = torch.tensor([[0.0, 2.0], [1.0, 1.0], [0.0, 0.0]]), torch.tensor([[1, 1], [1, 1], [0, 0]])
    # the row without a selected token is no member of group "b"
    plain, _ = advantage_estimators.get("grpo")(rewards, mask, group_ids=["a", "b", "b"], norm_adv_by_std_in_grpo=False)
    assert plain.tolist() == [[2.0, 2.0], [2.0, 2.0], [0.0, 0.0]]


def test_group_ids_as_a_tensor_and_of_wrong_length() -> None:
    rewards, mask = torch.randn(4, 3), torch.ones(4, 3)
    grpo = advantage_estimators.get("grpo")
    by_name, by_number = (
        grpo(rewards, mask, group_ids=list("aabb")),
        grpo(rewards, mask, group_ids=torch.tensor([7, 7, 1, 1])),
    )
    assert torch.equal(by_name[0], by_number[0])
    with pytest.raises(ConfigError, match="3 entries for 4 sequences"):
        grpo(rewards, mask, group_ids=list("aab"))


def test_gae_identities() -> None:
    """With gamma = lam = 1 the return of every token is the reward still to come; advantages are whitened."""
    case = build(5, 6, 10, holes=True, equal=False, gap=1.0, dtype=torch.float64)
    advantages, returns = run("gae", case)
    rewards = torch.where(case.mask.bool(), case.rewards, 0.0)
    to_come = rewards.flip(1).cumsum(1).flip(1) * case.mask
    torch.testing.assert_close(returns, to_come)
    assert abs(float(masked_mean(advantages, case.mask))) < 1e-9
    assert abs(float(advantages[case.mask.bool()].var()) - 1) < 1e-6


def test_unknown_estimator_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="grpo"):
        advantage_estimators.get("gpro")
