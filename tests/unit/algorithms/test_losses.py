"""Aggregation and the value loss: oracle, gradients, invariances."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import algorithms as oracle
from support.examples import examples
from support.messages import raises
from support.ragged_cases import Case, build, cases, rows_of
from torch import Tensor

from hone.algorithms import AGGREGATION_MODES, aggregate_loss, value_loss
from hone.errors import ConfigError

SCALE = 5.0
quick = examples(60)


def totals(case: Case) -> dict:
    return {"batch_num_tokens": int(case.mask.sum()), "global_batch_size": int((case.mask.sum(1) > 0).sum())}


# -------------------------------------------------------------------------------------------------------- aggregation


@quick
@given(case=cases(), mode=st.sampled_from(AGGREGATION_MODES))
def test_aggregation_equals_the_oracle(case: Case, mode: str) -> None:
    got = aggregate_loss(case.values, case.mask, mode, loss_scale_factor=SCALE)
    assert float(got) == pytest.approx(
        oracle.aggregate(rows_of(case.values), case.mask.tolist(), mode, SCALE), abs=1e-9
    )


def test_aggregation_refuses_what_it_cannot_know() -> None:
    loss, mask = torch.ones(2, 3), torch.ones(2, 3)
    with raises(ConfigError, "token-mean"):
        aggregate_loss(loss, mask, "token-men")
    with raises(ConfigError, "loss_scale_factor"):
        aggregate_loss(loss, mask, "seq-mean-token-sum-norm")
    for mode, name in {"token-mean": "batch_num_tokens", "seq-mean-token-sum": "global_batch_size"}.items():
        with raises(ValueError, name, "dp_size=2"):
            aggregate_loss(loss, mask, mode, dp_size=2)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_aggregation_and_value_loss_of_bfloat16_are_computed_in_float32(mode: str) -> None:
    """A bfloat16 sum of a thousand tokens would lose most of them: 256 + 1 = 256."""
    loss, mask = torch.full((2, 1000), 1.0, dtype=torch.bfloat16, requires_grad=True), torch.ones(2, 1000)
    got = aggregate_loss(loss, mask, mode, loss_scale_factor=1000.0)
    expected = {"token-sum": 2000.0, "seq-mean-token-sum": 1000.0}.get(mode, 1.0)
    assert got.dtype == torch.float32 and float(got.detach()) == expected
    got.backward()
    assert loss.grad is not None and loss.grad.dtype == torch.bfloat16
    assert float(value_loss(loss, 0 * loss, loss, mask, loss_agg_mode="token-mean")[0].detach()) == 0.5


# --------------------------------------------------------------------------------------------------------- value loss


@quick
@given(case=cases(), mode=st.sampled_from(AGGREGATION_MODES), data=st.data())
def test_value_loss(case: Case, mode: str, data: st.DataObject) -> None:
    mask, size = case.mask.tolist(), len(case.mask)

    def run(part: Case, **counts) -> tuple[Tensor, Tensor, dict]:
        values = part.values.clone().requires_grad_()
        loss, metrics = value_loss(
            values, part.rewards, part.advantages, part.mask, cliprange_value=0.3, loss_agg_mode=mode,
            loss_scale_factor=SCALE, **counts,
        )  # fmt: skip
        loss.backward()
        assert values.grad is not None
        return loss.detach(), values.grad, metrics

    loss, gradient, metrics = run(case)
    columns = [rows_of(x) for x in (case.values, case.rewards, case.advantages)]
    tokens = [
        [oracle.value(*xs, 0.3) if m else (math.nan, {}) for *xs, m in zip(*rows, strict=True)]
        for rows in zip(*columns, mask, strict=True)
    ]
    expected = oracle.aggregate([[t[0] for t in row] for row in tokens], mask, mode, SCALE)
    assert float(loss) == pytest.approx(expected, abs=1e-9)
    assert torch.isfinite(gradient).all() and not gradient[case.mask == 0].any()
    stats = [t[1] for row in tokens for t in row if t[1]]
    for key in metrics:
        assert float(metrics[key]) == pytest.approx(oracle.mean([s[key] for s in stats]), abs=1e-9)
    cut = data.draw(st.integers(0, size))
    halves = [run(case.select(part), **totals(case)) for part in (list(range(cut)), list(range(cut, size)))]
    torch.testing.assert_close(halves[0][0] + halves[1][0], loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat([h[1] for h in halves]), gradient, rtol=1e-9, atol=1e-12)


def test_value_loss_gradient_equals_finite_differences() -> None:
    case = build(9, 4, 6, holes=True, equal=False, gap=1.0, dtype=torch.float64)
    values = torch.where(case.mask.bool(), case.values, 0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, case.rewards, case.advantages, case.mask)[0], values)
