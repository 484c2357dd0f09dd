"""Every registered policy loss: against the oracle, its gradient, its invariances. A new registration joins by itself."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import algorithms as aggregation
from oracles import policy_losses as oracle
from support.examples import examples
from support.ragged_cases import Case, build, cases
from torch import Tensor

from hone.algorithms import AGGREGATION_MODES, policy_losses

NAMES = policy_losses.names()
SCALE = 5.0
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 2e-4}
quick = examples(50)

CHOICES: dict[str, list] = {
    "clip_ratio_low": [0.2, 0.1], "clip_ratio_high": [0.2, 0.28], "clip_ratio_c": [3.0, 1.5],
    "tau_pos": [1.0, 2.0], "tau_neg": [1.05, 0.5], "dro_beta": [0.05, 1.0],
    "vespo_k_pos": [2.0, 0.0], "vespo_lambda_pos": [3.0, 0.5], "vespo_k_neg": [3.0, 1.0], "vespo_lambda_neg": [2.0, 0.0],
    "clip_cov_ratio": [2e-4, 0.3, 1.0], "clip_cov_lb": [1.0, -1.0], "clip_cov_ub": [5.0, 2.0],
    "kl_cov_ratio": [2e-4, 0.4, 1.0], "ppo_kl_coef": [0.1, 1.0], "m2_threshold": [0.04, 0.5, 5.0],
}  # fmt: skip
REINFORCE = {"loss_type": "reinforce"}
COMBINATIONS: dict[str, list[dict[str, Any]]] = {
    "bypass_mode": [
        {},
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"},
        {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.1, "rollout_token_veto_threshold": 1e-4},
        REINFORCE,
        REINFORCE | {"rollout_is": "token"},
        REINFORCE | {"rollout_is": "token", "rollout_is_threshold": [0.5, 1.5], "rollout_token_veto_threshold": 0.5},
        REINFORCE | {"rollout_is": "sequence", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.1},
        REINFORCE | {"rollout_is": "token", "rollout_rs": "token_kpop", "rollout_rs_threshold": 0.1},
        {"rollout_rs": "token_kpop", "rollout_rs_threshold": 0.1},
        REINFORCE | {"rollout_is": "geometric", "rollout_is_threshold": 1.2},
    ]
}
"""Options that only make sense together, drawn as a whole."""


def draw_options(name: str, data: st.DataObject) -> dict[str, Any]:
    known = sorted(policy_losses.get(name).options & CHOICES.keys())
    options = {option: data.draw(st.sampled_from(CHOICES[option]), label=option) for option in known}
    return options | data.draw(st.sampled_from(COMBINATIONS.get(name, [{}])), label="combination")


def every_option(name: str) -> list[dict[str, Any]]:
    return COMBINATIONS.get(name, [{}])


def totals(case: Case) -> dict[str, int]:
    return {"batch_num_tokens": int(case.mask.sum()), "global_batch_size": int((case.mask.sum(1) > 0).sum())}


def run(name: str, case: Case, mode: str, **arguments: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    new = case.new.clone().requires_grad_()
    loss, metrics = policy_losses.get(name)(
        case.old, new, case.advantages, case.mask, loss_agg_mode=mode, loss_scale_factor=SCALE, **arguments
    )
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad, metrics


def tokens_of(case: Case) -> list[oracle.Rows]:
    """Old, new and advantages of the selected tokens, row by row."""
    columns = (case.old, case.new, case.advantages)
    return [[row[keep].double().tolist() for row, keep in zip(x, case.mask.bool(), strict=True)] for x in columns]


def aggregated(result: oracle.Result, mode: str) -> float:
    return aggregation.aggregate([[t[0] for t in row] for row in result], [[1] * len(r) for r in result], mode, SCALE)


def different_advantages_a_row(case: Case) -> Case:
    """One advantage for all tokens of a row, never 0."""
    advantages = torch.linspace(-1.5, 1.2, len(case.mask), dtype=case.advantages.dtype)[:, None]
    case.advantages = torch.where(case.mask.bool(), advantages, math.nan)
    return case


# -------------------------------------------------------------------------------------------------------------- oracle


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data(), mode=st.sampled_from(AGGREGATION_MODES))
def test_equals_the_oracle(name: str, dtype: torch.dtype, mode: str, data: st.DataObject) -> None:
    case, options = data.draw(cases(dtype), label="case"), draw_options(name, data)
    loss, gradient, metrics = run(name, case, mode, **options)
    old, new, advantages = tokens_of(case)
    result = oracle.POLICY_LOSSES[name](old, new, new, advantages, **options)
    size = aggregated([[(abs(loss), numbers) for loss, numbers in row] for row in result], mode)
    tolerance = TOLERANCES[dtype]
    assert float(loss) == pytest.approx(aggregated(result, mode), rel=tolerance, abs=tolerance * (1 + size))
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.isfinite(gradient).all() and not gradient[case.mask == 0].any()
    statistics = [numbers for row in result for _, numbers in row]
    if statistics:
        assert set(metrics) == {*statistics[0], "actor/ratio/max"}
        expected = {key: oracle.mean([numbers[key] for numbers in statistics]) for key in statistics[0]}
        expected["actor/ratio/max"] = max(numbers["actor/ratio/mean"] for numbers in statistics)
        assert {key: float(value) for key, value in metrics.items()} == pytest.approx(
            expected, rel=tolerance, abs=tolerance
        )


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_finite_differences(name: str, mode: str) -> None:
    """Finite differences of the oracle, in which what the method treats as a constant stays one."""
    case = build(11, 6, 7, holes=True, equal=False, gap=1.0, dtype=torch.float64)
    case.new = case.old + torch.linspace(-0.9, 0.8, case.old.numel(), dtype=torch.float64).view_as(case.old)
    old, new, advantages = tokens_of(case)
    eps = 1e-6
    for options in every_option(name):
        _, gradient, _ = run(name, case, mode, **options)
        got = [row[keep].tolist() for row, keep in zip(gradient, case.mask.bool(), strict=True)]
        for i, row in enumerate(new):
            for t in range(len(row)):
                moved = []
                for step in (eps, -eps):
                    shifted = copy.deepcopy(new)
                    shifted[i][t] += step
                    result = oracle.POLICY_LOSSES[name](old, shifted, new, advantages, **options)
                    moved.append(aggregated(result, mode))
                assert got[i][t] == pytest.approx((moved[0] - moved[1]) / (2 * eps), abs=1e-7), (options, i, t)


# --------------------------------------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("name", NAMES)
@quick
@given(case=cases(), mode=st.sampled_from(AGGREGATION_MODES), data=st.data())
def test_micro_batches_and_ranks_change_nothing(name: str, case: Case, mode: str, data: st.DataObject) -> None:
    options = draw_options(name, data)
    order = data.draw(st.permutations(range(len(case.mask))))
    cut = data.draw(st.integers(0, len(order)))
    parts = [order[:cut], order[cut:]]
    whole, gradient, metrics = run(name, case, mode, **options, **totals(case))

    prepared = policy_losses.get(name).prepare(case.old, case.new, case.advantages, case.mask, **options)
    assert bool(prepared) == policy_losses.get(name).needs_preparation

    def share(part: list[int], **more: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        rows = {key: value[part] for key, value in prepared.items()}
        return run(name, case.select(part), mode, **options, **totals(case), prepared=rows, **more)

    split = [share(part) for part in parts]
    torch.testing.assert_close(split[0][0] + split[1][0], whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat([s[1] for s in split]), gradient[order], rtol=1e-9, atol=1e-12)
    weights = [int(case.select(part).mask.sum()) for part in parts]
    for key, value in metrics.items():
        if sum(weights):
            joined = sum(w * s[2][key] for w, s in zip(weights, split, strict=True)) / sum(weights)
            joined = max(s[2][key] for s in split) if key.endswith("max") else joined
            torch.testing.assert_close(joined, value, rtol=1e-9, atol=1e-9)

    ranks = [share(part, dp_size=2)[0] for part in parts]
    torch.testing.assert_close((ranks[0] + ranks[1]) / 2, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(case=cases(), mode=st.sampled_from(AGGREGATION_MODES), data=st.data())
def test_order_and_padding_change_nothing(name: str, case: Case, mode: str, data: st.DataObject) -> None:
    options = draw_options(name, data)
    size, width = case.mask.shape
    whole, gradient, metrics = run(name, case, mode, **options)
    order = data.draw(st.permutations(range(size)))
    for other, rows in ((case.select(order), order), (case.padded(4, 2), list(range(size)))):
        loss, other_gradient, other_metrics = run(name, other, mode, **options)
        torch.testing.assert_close(loss, whole, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(other_gradient[:size, :width], gradient[rows], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(other_metrics, metrics, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------------ for every loss


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_gradient_is_that_of_the_policy_gradient(name: str) -> None:
    """At ratio 1 nothing is clipped: the gradient is -A, and importance weights multiply it."""
    case = different_advantages_a_row(build(4, 6, 8, holes=True, equal=False, gap=1.0, dtype=torch.float64))
    case.new = case.old
    weights = torch.linspace(0.5, 2.0, len(case.mask), dtype=torch.float64)[:, None].expand_as(case.old)
    far = {"clip_cov_lb": 1e6, "clip_cov_ub": 2e6} if name == "clip_cov" else {}
    for options in every_option(name):
        _, gradient, metrics = run(name, case, "token-sum", rollout_is_weights=weights, **far, **options)
        torch.testing.assert_close(gradient, torch.where(case.mask.bool(), -case.advantages * weights, 0.0))
        assert float(metrics["actor/ratio/max"]) == 1.0 and float(metrics["actor/ppo_kl"]) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_old_log_probs_advantages_and_weights_are_constants(name: str) -> None:
    case = build(4, 6, 8, holes=True, equal=False, gap=1.0, dtype=torch.float64)
    constants = [x.clone().requires_grad_() for x in (case.old, case.advantages, torch.ones_like(case.old))]
    loss, metrics = policy_losses.get(name)(
        constants[0], case.new.clone().requires_grad_(), constants[1], case.mask, rollout_is_weights=constants[2]
    )
    loss.backward()
    assert all(x.grad is None for x in constants)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_empty_batches(name: str) -> None:
    for shape in ((0, 0), (0, 3), (3, 0), (2, 3)):
        x, mask = torch.full(shape, math.nan, requires_grad=True), torch.zeros(shape)
        loss, metrics = policy_losses.get(name)(x, x, x, mask)
        loss.backward()
        assert float(loss.detach()) == 0 and not x.grad.any()
        assert all(float(v) == 0 for v in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_says_what_it_is(name: str) -> None:
    loss = policy_losses.get(name)
    assert loss.name == name and "A" in loss.formula and ("arXiv:" in loss.paper or "https:" in loss.paper)
    assert loss.per_token.__doc__ and loss.options == loss.defaults.keys()
    assert not loss.defaults.keys() & {"prepared", "loss_agg_mode"}
