"""Every registered advantage estimator: against the oracle, and its invariances. A new registration joins by itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import advantages as oracle
from support.advantage_cases import Call, call, calls
from support.examples import examples

from hone.algorithms import AdvantageEstimator, advantage_estimators

NAMES = advantage_estimators.names()
CHOICES = {
    "epsilon": [1e-6, 1e-3],
    "f_norm": [1.0, 2.0],
    "gamma": [1.0, 0.9, 0.0],
    "gdpo_reward_keys": [None, ["form"], ["form", "right"]],
    "gpg_count": ["scores", "advantages"],
    "handle_zero_tail": [True, False],
    "lam": [1.0, 0.7, 0.0],
    "norm_adv_by_std_in_grpo": [True, False],
    "step_advantage_w": [1.0, 0.5],
}
SCOPES = ("sequence", "group", "batch")
quick = examples(40)
exact = {"rtol": 1e-9, "atol": 1e-9}


def drawn(name: str, data: st.DataObject) -> tuple[AdvantageEstimator, Call, dict]:
    """An estimator, a batch for it, and options."""
    estimator = advantage_estimators.get(name)
    known = sorted(estimator.options & CHOICES.keys())
    return estimator, data.draw(calls(estimator)), {o: data.draw(st.sampled_from(CHOICES[o]), label=o) for o in known}


def assert_oracle(estimator: AdvantageEstimator, batch: Call, options: dict, **tolerance: float) -> None:
    rewards, mask, inputs = batch.for_oracle(estimator)
    expected = oracle.ESTIMATORS[estimator.name](rewards, mask, **inputs, **options)
    for got, want in zip(batch.run(estimator, **options), expected, strict=True):
        torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), **tolerance)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_equals_the_oracle(name: str, data: st.DataObject) -> None:
    estimator, batch, options = drawn(name, data)
    assert_oracle(estimator, batch, options, **exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
@examples(20)
@given(data=st.data())
def test_low_precision_inputs_equal_the_oracle_on_the_same_numbers(
    name: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    estimator, batch, options = drawn(name, data)
    batch = batch.to(dtype)
    assert all(result.dtype == torch.float32 for result in batch.run(estimator, **options))
    # whitening divides by sqrt(variance + 1e-8): the last bit of float32 is then visible at 1e-3
    assert_oracle(estimator, batch, options, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_order_and_padding_change_nothing(name: str, data: st.DataObject) -> None:
    estimator, batch, options = drawn(name, data)
    size, width = batch.mask.shape
    expected = batch.run(estimator, **options)
    order = data.draw(st.permutations(range(size)))
    for got, want in zip(batch.select(order).run(estimator, **options), expected, strict=True):
        torch.testing.assert_close(got, want[order], **exact)
    for got, want in zip(batch.padded(3, 2).run(estimator, **options), expected, strict=True):
        torch.testing.assert_close(got[:size, :width], want, **exact)
        assert not got[size:].any() and not got[:, width:].any()


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_tokens_with_mask_0_put_in_anywhere_change_nothing(name: str, data: st.DataObject) -> None:
    estimator, batch, options = drawn(name, data)
    where = data.draw(st.lists(st.integers(0, batch.mask.shape[1]), max_size=5))
    kept = batch.kept_columns(where)
    stretched = batch.stretched(where).run(estimator, **options)
    for got, want in zip(stretched, batch.run(estimator, **options), strict=True):
        torch.testing.assert_close(got[:, kept], want, **exact)
        assert got.count_nonzero() == got[:, kept].count_nonzero()


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_the_batch_may_be_cut_along_its_scope(name: str, data: st.DataObject) -> None:
    """Micro-batches and ranks: what depends on a sequence or a group only is the same when the rest is elsewhere."""
    estimator, batch, options = drawn(name, data)
    assert estimator.scope in SCOPES
    parts = {"sequence": [[i] for i in range(len(batch.mask))], "group": batch.parts(), "batch": []}[estimator.scope]
    expected = batch.run(estimator, **options)
    for part in parts:
        if batch.mask[part].any():
            for got, want in zip(batch.select(part).run(estimator, **options), expected, strict=True):
                torch.testing.assert_close(got, want[part], **exact)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_constants_that_own_their_memory(name: str) -> None:
    batch = call(0, 8, 6, holes=True, equal=False, least_group=2)
    batch.inputs["values"] = batch.inputs["values"].requires_grad_()
    before = batch.rewards.clone()
    advantages, returns = batch.run(advantage_estimators.get(name))
    assert not advantages.requires_grad and not returns.requires_grad
    advantages.add_(1.0)
    assert not torch.equal(advantages, returns)
    assert torch.equal(batch.rewards.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("name", NAMES)
def test_integer_rewards_and_every_type_of_mask(name: str) -> None:
    estimator, batch = advantage_estimators.get(name), call(3, 8, 6, holes=True, equal=False, least_group=2)
    batch.rewards = batch.rewards.nan_to_num(0).round().long()
    expected = batch.run(estimator)
    for dtype in (torch.bool, torch.float32, torch.uint8):
        batch.mask = batch.mask.to(dtype)
        assert all(torch.equal(got, want) for got, want in zip(batch.run(estimator), expected, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_what_it_says_of_itself(name: str) -> None:
    estimator = advantage_estimators.get(name)
    assert estimator.formula and estimator.paper and estimator.doc
    assert ("groups" in estimator.needs) == bool(estimator.group_of_one)
    assert estimator.needs.isdisjoint(estimator.uses)
    assert advantage_estimators.get(estimator.name) is estimator
