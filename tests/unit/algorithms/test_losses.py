"""Every registered policy loss, the value loss and the aggregation: oracle, gradients, invariances."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import algorithms as oracle
from support.ragged_cases import Case, build, cases, rows_of
from torch import Tensor

from hone.algorithms import AGGREGATION_MODES, aggregate_loss, policy_losses, value_loss
from hone.errors import ConfigError

NAMES = policy_losses.names()
OPTIONS = {"clip_ratio_low": [0.2, 0.1], "clip_ratio_high": [0.2, 0.28], "clip_ratio_c": [3.0, 1.5]}
SCALE = 5.0
quick = settings(max_examples=60, deadline=None)


def options_of(name: str, data: st.DataObject) -> dict:
    return {o: data.draw(st.sampled_from(OPTIONS[o]), label=o) for o in sorted(policy_losses.get(name).options)}


def totals(case: Case) -> dict:
    return {"batch_num_tokens": int(case.mask.sum()), "global_batch_size": int((case.mask.sum(1) > 0).sum())}


def loss_and_gradient(name: str, case: Case, mode: str, **arguments) -> tuple[Tensor, Tensor, dict]:
    new = case.new.clone().requires_grad_()
    loss, metrics = policy_losses.get(name)(
        case.old, new, case.advantages, case.mask, loss_agg_mode=mode, loss_scale_factor=SCALE, **arguments
    )
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad, metrics


@pytest.mark.parametrize("name", NAMES)
@quick
@given(case=cases(), mode=st.sampled_from(AGGREGATION_MODES), data=st.data())
def test_policy_loss_equals_the_oracle(name: str, case: Case, mode: str, data: st.DataObject) -> None:
    options = options_of(name, data)
    loss, gradient, metrics = loss_and_gradient(name, case, mode, **options)
    columns = [rows_of(x) for x in (case.old, case.new, case.advantages)]
    mask = case.mask.tolist()
    tokens = [
        [oracle.POLICY_LOSSES[name](*xs, **options) if m else (math.nan, {}) for *xs, m in zip(*rows, strict=True)]
        for rows in zip(*columns, mask, strict=True)
    ]
    expected = oracle.aggregate([[t[0] for t in row] for row in tokens], mask, mode, SCALE)
    torch.testing.assert_close(float(loss), expected, rtol=1e-9, atol=1e-9)
    assert torch.isfinite(gradient).all() and not gradient[case.mask == 0].any()
    stats = [t[1] for row in tokens for t in row if t[1]]
    for key in stats[0] if stats else ():
        torch.testing.assert_close(float(metrics[key]), oracle.mean([s[key] for s in stats]), rtol=1e-9, atol=1e-9)
    if stats:
        assert float(metrics["actor/ratio/max"]) == pytest.approx(max(s["actor/ratio/mean"] for s in stats))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_policy_loss_gradient_equals_finite_differences(name: str, mode: str) -> None:
    case = build(11, 5, 6, holes=True, equal=False, gap=1.0, dtype=torch.float64)
    case.new = torch.where(case.mask.bool(), case.new, 0.0)

    def loss(new: Tensor) -> Tensor:
        return policy_losses.get(name)(
            case.old, new, case.advantages, case.mask, loss_agg_mode=mode, loss_scale_factor=SCALE
        )[0]

    assert torch.autograd.gradcheck(loss, case.new.requires_grad_(), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(case=cases(), mode=st.sampled_from(AGGREGATION_MODES), data=st.data())
def test_policy_loss_split_order_padding_and_ranks(name: str, case: Case, mode: str, data: st.DataObject) -> None:
    options = options_of(name, data) | totals(case)
    size, width = case.mask.shape
    whole, gradient, metrics = loss_and_gradient(name, case, mode, **options)

    order = data.draw(st.permutations(range(size)))
    cut = data.draw(st.integers(0, size))
    parts = [order[:cut], order[cut:]]
    split = [loss_and_gradient(name, case.select(part), mode, **options) for part in parts]
    torch.testing.assert_close(split[0][0] + split[1][0], whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat([s[1] for s in split]), gradient[order], rtol=1e-9, atol=1e-12)
    weights = [int(case.select(part).mask.sum()) for part in parts]
    for key, value in metrics.items():
        if not key.endswith("max") and sum(weights):
            joined = sum(w * s[2][key] for w, s in zip(weights, split, strict=True)) / sum(weights)
            torch.testing.assert_close(joined, value, rtol=1e-9, atol=1e-9)

    ranks = [loss_and_gradient(name, case.select(part), mode, dp_size=2, **options)[0] for part in parts]
    torch.testing.assert_close((ranks[0] + ranks[1]) / 2, whole, rtol=1e-9, atol=1e-9)

    more, more_gradient, _ = loss_and_gradient(name, case.padded(4, 2), mode, **options)
    torch.testing.assert_close(more, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(more_gradient[:size, :width], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_policy_loss_in_lower_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    case = build(2, 16, 30, holes=True, equal=False, gap=0.1, dtype=dtype)
    double = Case(case.mask, *(getattr(case, f).double() for f in case.floats()), case.group_ids)
    low, high = (loss_and_gradient(name, c, "token-mean")[0] for c in (case, double))
    assert abs(float(low) - float(high)) < tolerance


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_gradient_is_that_of_the_policy_gradient(name: str) -> None:
    """At ratio 1 nothing is clipped: the gradient is -A, and importance weights multiply it."""
    case = build(4, 6, 8, holes=True, equal=False, gap=1.0, dtype=torch.float64)
    case.new = case.old
    weights = torch.rand_like(case.old)
    _, gradient, metrics = loss_and_gradient(name, case, "token-sum", rollout_is_weights=weights)
    torch.testing.assert_close(gradient, torch.where(case.mask.bool(), -case.advantages * weights, 0.0))
    assert float(metrics["actor/ratio/max"]) == 1.0 and float(metrics["actor/ppo_kl"]) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_policy_loss_options(name: str) -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ConfigError, match="clip_ratio_low"):
        policy_losses.get(name)(x, x, x, x, clip_ratio_lo=0.1)
    policy_losses.get(name)(x, x, x, x, clip_ratio_low=0.1, clip_ratio_high=0.1, clip_ratio_c=2.0)
    loss, metrics = policy_losses.get(name)(*(torch.zeros(0, 0) for _ in range(4)))
    assert float(loss) == 0 and all(float(v) == 0 for v in metrics.values())


def test_dual_clip_must_be_above_one() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ConfigError, match="clip_ratio_c=1.0 must be above 1"):
        policy_losses.get("vanilla")(x, x, x, x, clip_ratio_c=1.0)


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
    with pytest.raises(ConfigError, match="token-mean"):
        aggregate_loss(loss, mask, "token-men")
    with pytest.raises(ConfigError, match="loss_scale_factor"):
        aggregate_loss(loss, mask, "seq-mean-token-sum-norm")
    for mode, name in {"token-mean": "batch_num_tokens", "seq-mean-token-sum": "global_batch_size"}.items():
        with pytest.raises(ValueError, match=name):
            aggregate_loss(loss, mask, mode, dp_size=2)


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
