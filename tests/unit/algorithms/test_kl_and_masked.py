"""KL estimators, controllers and masked statistics against the oracle."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import algorithms as oracle
from oracles import divergences
from support.examples import examples
from support.messages import raises
from support.ragged_cases import Case, cases, rows_of

from hone.algorithms import (
    KL_KINDS,
    EntropyController,
    apply_kl_penalty,
    kl_controller,
    kl_penalty,
    largest_share,
    masked_mean,
    masked_sum,
)
from hone.errors import ConfigError, InvariantError

quick = examples(60)


@pytest.mark.parametrize("kind", KL_KINDS)
@given(new=st.floats(-40, 0), ref=st.floats(-40, 0))
@examples(40)
def test_kl_value_and_gradient(kind: str, new: float, ref: float) -> None:
    lp, base = torch.tensor([new], dtype=torch.float64, requires_grad=True), kind.removesuffix("+")
    value = kl_penalty(lp, torch.tensor([ref], dtype=torch.float64), kind)
    assert float(value.detach()) == pytest.approx(divergences.estimate(new, ref, base), rel=1e-9, abs=1e-12)
    value.backward()
    d = new - ref
    if kind.endswith("+") or base in ("k2", "mse"):
        assert float(lp.grad) == pytest.approx(d)
    elif abs(d) > 1e-3 and abs(d + 20) > 1e-3:
        h = 1e-6
        difference = (divergences.estimate(new + h, ref, base) - divergences.estimate(new - h, ref, base)) / (2 * h)
        assert float(lp.grad) == pytest.approx(difference, rel=1e-4, abs=1e-4)


def test_kl_estimators_estimate_the_kl() -> None:
    """k1 and k3 are unbiased (below k3's cap): their exact expectation over the policy is the KL divergence."""
    torch.manual_seed(0)
    p, q = (0.5 * torch.randn(2, 50, dtype=torch.float64)).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * kl_penalty(p, q, kind)).sum(), exact)
    with raises(ConfigError, "low_var_kl"):
        kl_penalty(p, q, "low_var")


@quick
@given(case=cases(), coef=st.sampled_from([0.0, 0.1]), kind=st.sampled_from(["kl", "k3"]))
def test_kl_in_reward(case: Case, coef: float, kind: str) -> None:
    rewards, mean_kl = apply_kl_penalty(case.rewards, case.old, case.new, case.mask, coef, kind)
    per_row = []
    for i, keep in enumerate(case.mask.tolist()):
        penalties = []
        for t, m in enumerate(keep):
            penalty = divergences.estimate(float(case.old[i, t]), float(case.new[i, t]), kind) if m else 0.0
            expected = float(case.rewards[i, t]) - coef * penalty if m else 0.0
            assert float(rewards[i, t]) == pytest.approx(expected, abs=1e-9)
            penalties += [penalty] * m
        per_row += [oracle.mean(penalties)] if penalties else []
    assert float(mean_kl) == pytest.approx(oracle.mean(per_row), abs=1e-9)


def test_adaptive_controller_follows_its_target_and_survives_a_checkpoint() -> None:
    controller = kl_controller("adaptive", 0.1, target_kl=0.05, horizon=100)
    controller.update(0.051, n_steps=10)
    assert controller.value == pytest.approx(0.1 * (1 + 0.02 * 10 / 100))
    controller.update(100.0, n_steps=10)  # the error is clipped at 20 %
    assert controller.value == pytest.approx(0.1 * 1.002 * 1.02)
    before = controller.value
    controller.update(0.0, n_steps=10)
    assert controller.value == pytest.approx(before * 0.98)
    again = kl_controller("adaptive", 0.1, target_kl=0.05, horizon=100)
    again.load_state_dict(controller.state_dict())
    assert again.value == controller.value


def test_adaptive_controller_survives_a_long_step_and_refuses_nan() -> None:
    controller = kl_controller("adaptive", 0.1, target_kl=0.05, horizon=100)
    controller.update(0.0, n_steps=100_000)  # 0.2 x 1000 horizons would have made the coefficient negative
    assert controller.value == pytest.approx(0.1 * 0.8)
    with raises(InvariantError, "NaN"):
        controller.update(math.nan, n_steps=10)
    assert controller.value == pytest.approx(0.1 * 0.8)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_keeps_nan_out_of_the_gradient(kind: str) -> None:
    lp = torch.tensor([[-1.0, math.nan, -3.0], [math.nan] * 3], requires_grad=True)
    ref = torch.tensor([[-2.0, -1.0, -2.5], [-math.inf] * 3])
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    kl_penalty(lp, ref, kind, mask).sum().backward()
    assert lp.grad is not None and lp.grad.isfinite().all() and not lp.grad[mask == 0].any()
    assert lp.grad[0, 0] != 0


def test_kl_of_bfloat16_is_computed_in_float32() -> None:
    lp, ref = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16), torch.tensor([-1.0078125, -2.5], dtype=torch.bfloat16)
    for kind in KL_KINDS:
        torch.testing.assert_close(kl_penalty(lp, ref, kind), kl_penalty(lp.float(), ref.float(), kind), rtol=0, atol=0)


def test_fixed_controller_and_wrong_settings() -> None:
    fixed = kl_controller("fixed", 0.1)
    fixed.update(5.0, 100)
    assert fixed.value == 0.1
    with raises(ConfigError, "adaptive", where="algorithm.kl_ctrl.type"):
        kl_controller("adaptiv", 0.1)
    with raises(ConfigError, "horizon > 0", "algorithm.kl_ctrl.horizon=10000"):
        kl_controller("adaptive", 0.1, 0.1, 0)


@quick
@given(case=cases())
def test_masked_statistics(case: Case) -> None:
    x, mask = case.values, case.mask
    seen = oracle.selected(rows_of(x), mask.tolist())
    assert float(masked_sum(x, mask)) == pytest.approx(math.fsum(seen), abs=1e-12)
    assert float(masked_mean(x, mask)) == pytest.approx(oracle.mean(seen), abs=1e-12)
    rows = oracle.compact(rows_of(x), mask.tolist())
    assert masked_mean(x, mask, dim=1).tolist() == pytest.approx([oracle.mean(row) for row in rows], abs=1e-12)


def test_nan_outside_the_mask_does_not_reach_the_gradient() -> None:
    x = torch.tensor([[1.0, math.nan], [math.inf, 2.0]], requires_grad=True)
    masked_mean(x, torch.tensor([[1, 0], [0, 1]])).backward()
    assert x.grad is not None and x.grad.tolist() == [[0.5, 0.0], [0.0, 0.5]]


@quick
@given(st.lists(st.floats(0, 2) | st.just(math.nan), max_size=30), st.floats(0, 0.3), st.integers(0, 30))
def test_the_weight_of_the_bonus_follows_its_target(entropies: list[float], coef: float, resumed_at: int) -> None:
    """Compared with the rule written out, also for a controller that is restored in between."""
    controller, value, last = EntropyController(coef, 1.0, 0.1, 0.4), coef, math.inf
    for number, entropy in enumerate(entropies):
        if number == resumed_at:
            state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
            controller = EntropyController(coef, 1.0, 0.1, 0.4)
            controller.load_state_dict(state)
        assert controller.weight == pytest.approx(value if last <= 1.0 else 0.0)
        controller.update(entropy)
        if not math.isnan(entropy):
            value, last = (min(value + 0.1, 0.4) if entropy <= 1.0 else max(value - 0.1, 0.0)), entropy
    constant = EntropyController(coef, None, 0.1, 0.4)
    constant.load_state_dict(controller.state_dict())
    assert constant.weight == coef


@quick
@given(
    values=st.lists(st.floats(0, 10, width=32), min_size=1, max_size=40),
    share=st.floats(0.01, 1),
    data=st.data(),
)
def test_the_largest_share(values: list[float], share: float, data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    marked, least = largest_share(torch.tensor(values), torch.tensor(mask).int(), share)
    counted = sorted(value for value, counts in zip(values, mask, strict=True) if counts)
    if not counted:
        assert not marked.any() and math.isnan(least)
        return
    bound = torch.quantile(torch.tensor(counted, dtype=torch.float64), 1 - share, interpolation="higher")
    assert least == pytest.approx(float(bound))
    assert marked.tolist() == [counts and value >= least for value, counts in zip(values, mask, strict=True)]
    assert marked.sum() >= share * (len(counted) - 1)
