"""Rollout correction against the oracle; identities, invariances, the grammar of thresholds and its errors."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import corrections as oracle
from support.examples import examples
from support.messages import raises
from support.ragged_cases import Case, build, cases, rows_of
from torch import Tensor

from hone.algorithms import (
    ROLLOUT_CORRECTION_PRESETS,
    Correction,
    aggregate_loss,
    check_rollout_correction,
    off_policy_metrics,
    rollout_correction,
)
from hone.algorithms.off_policy import IMPORTANCE_LEVELS, REJECTION_OPTIONS, CorrectionRules
from hone.algorithms.off_policy.correction import kpop
from hone.errors import ConfigError

quick = examples(60)
K1_BOUNDS = [(None, 2.0), (0.5, 2.0), (0.999, 1.001), (0.0, 1.5), (0.2, 1.1)]


K_BOUNDS = [(None, 1e-5), (None, 0.01), (None, 0.5), (None, 100.0)]


def rejection(option: str) -> st.SearchStrategy[tuple]:
    bounds = st.sampled_from(K1_BOUNDS if option.endswith("k1") else K_BOUNDS)
    return bounds.map(lambda low_high: (option, *low_high))


everything = st.builds(
    oracle.Options,
    level=st.sampled_from([None, *IMPORTANCE_LEVELS]),
    low=st.sampled_from([None, 0.0, 0.5, 0.99]),
    high=st.sampled_from([1.01, 2.0, 5.0]),
    normalize=st.booleans(),
    rejections=st.lists(st.sampled_from(REJECTION_OPTIONS).flatmap(rejection), unique_by=lambda r: r[0], max_size=3),
    veto=st.sampled_from([None, 1e-4, 0.5]),
)


def written(o: oracle.Options) -> dict:
    """The options as a configuration spells them."""
    return {
        "rollout_is": o.level,
        "rollout_is_threshold": o.high if o.low is None else f"{o.low}_{o.high}",
        "rollout_is_batch_normalize": o.normalize and o.level is not None,
        "rollout_rs": ",".join(name for name, _, _ in o.rejections) or None,
        "rollout_rs_threshold": ", ".join(str(hi) if lo is None else f"{lo}_{hi}" for _, lo, hi in o.rejections)
        or None,
        "rollout_token_veto_threshold": o.veto,
    }


def of_case(case: Case, **settings) -> Correction:
    return rollout_correction(case.new, case.old, case.mask, **settings)


def assert_metrics_equal(metrics: dict[str, Tensor], expected: dict[str, float]) -> None:
    assert set(metrics) == set(expected)
    for name, value in metrics.items():
        # shares are counted in float32; a spread of equal huge numbers is 0 up to their last digits
        rel = 1e-6 if "fraction" in name or "oob" in name else 1e-8
        scale = 1e-6 * max(1.0, abs(expected.get(name.removesuffix("std") + "max", 1.0))) if "std" in name else 1e-9
        assert float(value) == pytest.approx(expected[name], rel=rel, abs=scale), name


# ------------------------------------------------------------------------------------------------- oracle, invariances


def assert_equals_the_oracle(case: Case, chosen: oracle.Options) -> None:
    result = of_case(case, **written(chosen))
    weights, mask, metrics = oracle.correction(rows_of(case.new), rows_of(case.old), case.mask.tolist(), chosen)
    assert result.response_mask.tolist() == mask and result.response_mask.dtype == case.mask.dtype
    assert (result.weights is None) == (weights is None)
    if result.weights is not None and weights is not None:
        torch.testing.assert_close(result.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert_metrics_equal(result.metrics, metrics)


@quick
@given(case=cases(), chosen=everything)
def test_any_combination_equals_the_oracle(case: Case, chosen: oracle.Options) -> None:
    assert_equals_the_oracle(case, chosen)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("low", [None, 0.0, 0.5])
@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
@examples(25)
@given(case=cases(), high=st.sampled_from([1.01, 2.0]))
def test_weights_equal_the_oracle(level: str, low: float | None, normalize: bool, case: Case, high: float) -> None:
    assert_equals_the_oracle(case, oracle.Options(level, low, high, normalize))


@pytest.mark.parametrize("option", REJECTION_OPTIONS)
@examples(25)
@given(case=cases(), data=st.data())
def test_rejection_equals_the_oracle(option: str, case: Case, data: st.DataObject) -> None:
    assert_equals_the_oracle(case, oracle.Options(rejections=[data.draw(rejection(option))]))


@quick
@given(case=cases(), threshold=st.sampled_from([1e-4, 0.5]))
def test_veto_equals_the_oracle(case: Case, threshold: float) -> None:
    assert_equals_the_oracle(case, oracle.Options(veto=threshold))


@pytest.mark.parametrize("preset", ROLLOUT_CORRECTION_PRESETS)
@examples(20)
@given(case=cases(), data=st.data())
def test_presets_are_invariant_to_order_padding_and_split(preset: str, case: Case, data: st.DataObject) -> None:
    """And so to how ranks share the batch: every row's weights and mask depend on that row alone."""
    chosen = ROLLOUT_CORRECTION_PRESETS[preset]
    check_rollout_correction(**chosen)
    chosen = {key: value for key, value in chosen.items() if key not in ("bypass_mode", "loss_type")}
    size, width = case.mask.shape
    whole = of_case(case, **chosen)
    empty = torch.zeros(0)
    order = data.draw(st.permutations(range(size)))
    cut = data.draw(st.integers(0, size))
    parts = [of_case(case.select(part), **chosen) for part in (order[:cut], order[cut:])]
    assert torch.equal(torch.cat([p.response_mask for p in parts]), whole.response_mask[order])
    if whole.weights is not None:
        joined = torch.cat([empty if p.weights is None else p.weights for p in parts])
        torch.testing.assert_close(joined, whole.weights[order], rtol=1e-12, atol=0)
    padded = of_case(case.padded(3, 2), **chosen)
    assert (
        torch.equal(padded.response_mask[:size, :width], whole.response_mask) and not padded.response_mask[size:].any()
    )
    shuffled = of_case(case.select(order), **chosen)
    for other in (padded, shuffled):
        assert_metrics_equal(other.metrics, {name: float(value) for name, value in whole.metrics.items()})


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
@quick
@given(case=cases())
def test_normalised_weights_average_to_one_over_what_is_left(level: str, case: Case) -> None:
    result = of_case(
        case,
        rollout_is=level,
        rollout_is_batch_normalize=True,
        rollout_rs="token_k2",
        rollout_rs_threshold=0.1,
    )
    mask = result.response_mask.bool()
    if mask.any() and float(result.metrics["rollout_corr/rollout_is_batch_norm_factor"]) != 1.0:
        assert result.weights is not None
        units = result.weights[mask] if level == "token" else result.weights.amax(1)[mask.any(1)]
        assert float(units.mean()) == pytest.approx(1.0)


@pytest.mark.parametrize("preset", ROLLOUT_CORRECTION_PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_computed_in_float32(preset: str, dtype: torch.dtype) -> None:
    chosen = {k: v for k, v in ROLLOUT_CORRECTION_PRESETS[preset].items() if k not in ("bypass_mode", "loss_type")}
    case = build(5, 16, 24, holes=True, equal=False, gap=0.3, dtype=dtype)
    low = of_case(case, **chosen)
    high = rollout_correction(case.new.double(), case.old.double(), case.mask, **chosen)
    assert torch.equal(low.response_mask, high.response_mask)
    if low.weights is not None and high.weights is not None:
        assert low.weights.dtype == torch.float32
        torch.testing.assert_close(low.weights.double(), high.weights, rtol=1e-4, atol=1e-6)
    for name, value in low.metrics.items():
        assert float(value) == pytest.approx(float(high.metrics[name]), rel=1e-3, abs=1e-4), name


# ---------------------------------------------------------------------------------------------------------- identities


def test_on_policy_nothing_changes() -> None:
    case = build(3, 8, 10, holes=True, equal=False, gap=0.0, dtype=torch.float32)
    for preset, chosen in ROLLOUT_CORRECTION_PRESETS.items():
        chosen = {k: v for k, v in chosen.items() if k not in ("bypass_mode", "loss_type")}
        result = rollout_correction(case.old, case.old, case.mask, **chosen)
        assert torch.equal(result.response_mask, case.mask), preset
        if result.weights is not None:
            assert torch.equal(result.weights, case.mask.float()), preset
            assert float(result.metrics["rollout_corr/rollout_is_eff_sample_size"]) == pytest.approx(1.0)
        for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ratio_abs_max"):
            assert float(result.metrics[f"rollout_corr/{name}"]) == 0.0


def test_sequence_weights_are_unbiased_and_the_diagnostics_are_the_divergences() -> None:
    """Over all sequences of two tokens, weighted by their probability under the policy that sampled."""
    torch.manual_seed(0)
    vocabulary, steps = 3, 2
    old, rollout = (0.3 * torch.randn(2, steps, vocabulary, dtype=torch.float64)).log_softmax(-1)
    sequences = torch.tensor(list(itertools.product(range(vocabulary), repeat=steps)))
    at = torch.arange(steps)
    old_lp, rollout_lp, mask = old[at, sequences], rollout[at, sequences], torch.ones(len(sequences), steps)
    p, q = old_lp.sum(1).exp(), rollout_lp.sum(1).exp()
    value = torch.randn(len(sequences), dtype=torch.float64)

    result = rollout_correction(old_lp, rollout_lp, mask, rollout_is="sequence", rollout_is_threshold=1e6)
    assert result.weights is not None
    torch.testing.assert_close((q * result.weights[:, 0] * value).sum(), (p * value).sum())

    # the diagnostics are means over a sample: one sequence at a time gives what to weigh with q
    alone = [off_policy_metrics(a[None], b[None], m[None]) for a, b, m in zip(old_lp, rollout_lp, mask, strict=True)]
    expected = {
        "kl": (rollout.exp() * (rollout - old)).sum() / steps,
        "k3_kl": (rollout.exp() * (rollout - old)).sum() / steps,
        "chi2_token": ((2 * old - rollout).exp().sum(-1) - 1).mean(),
        "chi2_seq": (p * p / q).sum() - 1,
    }
    for name, exact in expected.items():
        mean = sum(weight * one[f"rollout_corr/{name}"] for weight, one in zip(q, alone, strict=True))
        torch.testing.assert_close(mean, exact)


def test_k1_bounds_hold_for_the_ratio_itself() -> None:
    """Not for its inverse: 0.5_5.0 keeps a token that became four times likelier and drops one four times rarer."""
    log_ratio = torch.tensor([[math.log(4.0), math.log(0.25)]])
    for option in ("token_k1", "seq_sum_k1", "seq_mean_k1"):
        rows = log_ratio.t() if option != "token_k1" else log_ratio
        result = rollout_correction(
            rows, torch.zeros_like(rows), torch.ones_like(rows), rollout_rs=option, rollout_rs_threshold="0.5_5.0"
        )
        assert result.response_mask.flatten().tolist() == [1.0, 0.0], option


EXTREMES = [-math.inf, -80.0, -20.0, math.log(1e-6), -5.0, -0.7, -0.01, -1e-5, math.log1p(-1e-6), -1e-8, -0.0, 1e-7]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_kpop_of_extreme_probabilities_equals_the_oracle(dtype: torch.dtype, error: float) -> None:
    """Between nearly 0 and exactly 1, or above it by rounding: finite, the same in both orders, 0 for equal policies."""
    column = torch.tensor(EXTREMES, dtype=dtype)
    table = kpop(column[:, None], column[None, :])
    expected = [[oracle.kpop(p, q) for q in column.tolist()] for p in column.tolist()]
    torch.testing.assert_close(table, torch.tensor(expected, dtype=dtype), rtol=10 * error, atol=error)
    assert torch.equal(table, table.T) and not table.diagonal().any() and float(table.max()) < 13.82


def kept_by_kpop(old: list[float], rollout: list[float], phi: float) -> list[float]:
    p, q = (torch.tensor([row + [math.nan]]) for row in (old, rollout))
    mask = torch.tensor([[1.0] * len(old) + [0.0]])
    result = rollout_correction(p.log(), q.log(), mask, rollout_rs="token_kpop", rollout_rs_threshold=phi)
    return result.response_mask[0, :-1].tolist()


def test_kpop_bounds_both_directions() -> None:
    """KL(0.5 || 0.25) = 0.144 and KL(0.25 || 0.5) = 0.131, in nats, of "this token, or any other"."""
    for phi, kept in ((0.13, 0.0), (0.14, 0.0), (0.15, 1.0)):
        assert kept_by_kpop([0.5, 0.25], [0.25, 0.5], phi) == [kept, kept]


def test_kpop_lets_rare_tokens_move_further_than_likely_ones() -> None:
    assert kept_by_kpop([0.02, 0.004, 0.99, 0.9], [0.004, 0.02, 0.9, 0.99], 0.1) == [1, 1, 0, 0]


def test_the_preset_of_kpop_weighs_kept_tokens_by_their_whole_ratio() -> None:
    chosen = ROLLOUT_CORRECTION_PRESETS["decoupled_token_kpop"]
    chosen = {key: value for key, value in chosen.items() if key not in ("bypass_mode", "loss_type")}
    old, rollout = torch.tensor([[0.02, 0.004, 0.99]]), torch.tensor([[0.004, 0.02, 0.9]])
    weights = rollout_correction(old.log(), rollout.log(), torch.ones(1, 3), **chosen).weights
    assert weights is not None and weights[0].tolist() == pytest.approx([5.0, 0.2, 0.0])


def test_kpop_with_a_large_threshold_keeps_all() -> None:
    p = [math.exp(x) for x in EXTREMES]
    assert kept_by_kpop(p, p[::-1], 14.0) == [1.0] * len(p)
    assert kept_by_kpop([math.nan], [0.5], 14.0) == [0.0], "NaN inside the mask does not pass"


def test_weights_are_truncated_or_masked() -> None:
    ratio = torch.tensor([[0.25, 1.0, 4.0]])
    weights = {
        threshold: rollout_correction(
            ratio.log(), torch.zeros(1, 3), torch.ones(1, 3), rollout_is="token", rollout_is_threshold=threshold
        ).weights
        for threshold in ("2.0", "0.5_2.0", "0.0_2.0", "0.5_5.0")
    }
    rows = {key: [round(x, 6) for x in value.flatten().tolist()] for key, value in weights.items() if value is not None}
    assert rows == {
        "2.0": [0.25, 1.0, 2.0],
        "0.5_2.0": [0.0, 1.0, 0.0],
        "0.0_2.0": [0.25, 1.0, 0.0],
        "0.5_5.0": [0.0, 1.0, 4.0],
    }


def test_one_impossible_token_vetoes_its_sequence() -> None:
    old = torch.tensor([[-1.0, -12.0, -1.0], [-1.0, -9.0, -1.0], [-1.0, math.nan, -1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 1]])
    result = rollout_correction(old, torch.full_like(old, -1.0), mask, rollout_token_veto_threshold=1e-4)
    assert result.response_mask.tolist() == [[0, 0, 0], [1, 1, 1], [1, 0, 1]]
    assert float(result.metrics["rollout_corr/rollout_is_veto_fraction"]) == pytest.approx(1 / 3)
    assert float(result.metrics["rollout_corr/rollout_is_catastrophic_token_fraction"]) == pytest.approx(1 / 8)


def test_token_mean_divides_by_what_is_left() -> None:
    log_ratio = torch.tensor([[0.0, 3.0], [0.0, 0.0]])
    result = rollout_correction(
        log_ratio, torch.zeros(2, 2), torch.ones(2, 2), rollout_rs="token_k2", rollout_rs_threshold=1.0
    )
    assert float(aggregate_loss(torch.full((2, 2), 6.0), result.response_mask, "token-mean")) == 6.0


def test_nothing_reaches_the_gradient() -> None:
    log_probs = torch.zeros(2, 2, requires_grad=True)
    result = rollout_correction(log_probs, torch.zeros(2, 2), torch.ones(2, 2), rollout_is="token")
    assert result.weights is not None and not result.weights.requires_grad
    assert not any(value.requires_grad for value in result.metrics.values())


def test_a_batch_without_tokens_gives_zeros() -> None:
    for shape in ((3, 4), (0, 4), (3, 0)):
        nothing = torch.full(shape, math.nan)
        result = rollout_correction(
            nothing,
            nothing,
            torch.zeros(shape),
            rollout_is="sequence",
            rollout_is_threshold="0.5_2.0",
            rollout_is_batch_normalize=True,
            rollout_rs=REJECTION_OPTIONS,
            rollout_rs_threshold=3.0,
            rollout_token_veto_threshold=1e-4,
        )
        assert result.weights is not None and not result.weights.any() and not result.response_mask.any()
        factor = result.metrics.pop("rollout_corr/rollout_is_batch_norm_factor")
        assert float(factor) == 1.0 and not any(float(value) for value in result.metrics.values())


def test_an_impossible_token_is_rejected_and_affects_no_other() -> None:
    """An engine that reports -inf for a token it sampled: the token's weight is bounded, k options reject it."""
    rollout = torch.tensor([[-1.0, -math.inf], [-1.0, -1.0]])
    result = rollout_correction(
        torch.full((2, 2), -1.0),
        rollout,
        torch.ones(2, 2),
        rollout_is="token",
        rollout_rs="seq_max_k2",
        rollout_rs_threshold=1.0,
    )
    assert result.weights is not None and result.weights.tolist() == [[0.0, 0.0], [1.0, 1.0]]


# ------------------------------------------------------------------------------------------------------------- grammar


@pytest.mark.parametrize(
    "spelling", [{"rollout_is_threshold": t} for t in ("0.5_5.0", "0.5_5", [0.5, 5], ["0.5", "5.0"], (0.5, 5.0))]
)
def test_two_bounds_of_weights(spelling: dict) -> None:
    rule = CorrectionRules.parse(rollout_is="token", **spelling).weight
    assert rule is not None and (rule.low, rule.high) == (0.5, 5.0)


@pytest.mark.parametrize("threshold", [2, 2.0, "2", "2.0", [2.0]])
def test_one_bound_of_weights(threshold: object) -> None:
    rule = CorrectionRules.parse(rollout_is="token", rollout_is_threshold=threshold).weight  # pyright: ignore
    assert rule is not None and (rule.low, rule.high) == (None, 2.0)


@pytest.mark.parametrize(
    ("names", "thresholds"),
    [
        ("token_k1,seq_max_k2", "0.5_2.0,0.1"),
        (" token_k1 , seq_max_k2 ", " 0.5_2.0 , 0.1 "),
        (["token_k1", "seq_max_k2"], ["0.5_2.0", 0.1]),
        ("token_k1,seq_max_k2,token_k1", "2.0,0.1,7.0"),
    ],
)
def test_lists_of_rejections(names: object, thresholds: object) -> None:
    rules = CorrectionRules.parse(rollout_rs=names, rollout_rs_threshold=thresholds).rejections  # pyright: ignore
    assert [rule.option for rule in rules] == ["token_k1", "seq_max_k2"]
    assert (rules[0].low, rules[0].high) == pytest.approx((-math.log(2), math.log(2)))
    assert (rules[1].low, rules[1].high) == (-math.inf, 0.1)


def test_one_threshold_serves_all() -> None:
    rules = CorrectionRules.parse(rollout_rs="token_k2,seq_mean_k3", rollout_rs_threshold=0.3).rejections
    assert [rule.high for rule in rules] == [0.3, 0.3]


@pytest.mark.parametrize(
    ("wrong", "mention"),
    [
        ({"rollout_is": "tokens"}, "Did you mean token"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.55}, "0.5_5 as 0.55"),
        ({"rollout_is": "token", "rollout_is_threshold": "1.5_5.0"}, "rollout_is_threshold=1.5_5.0"),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_2.0_3.0"}, "lower_upper"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, "'two'"),
        ({"rollout_is": "token", "rollout_is_threshold": True}, "'True'"),
        ({"rollout_is": "token", "rollout_is_threshold": -1}, "'-1'"),
        ({"rollout_is": "token", "rollout_is_threshold": math.nan}, "'nan'"),
        ({"rollout_is": "token", "rollout_is_threshold": []}, "rollout_is_threshold=[]"),
        ({"rollout_is_batch_normalize": True}, "rollout_is=token"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold=0.5_2.0"),
        ({"rollout_rs": "token_k1,seq_max_k2"}, '"0.5_2.0,0.01"'),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 2.0}, "rollout_rs=seq_mean_k1"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0}, "seq_max_k2"),
        ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.1_0.2"}, "rollout_rs_threshold=0.2"),
        ({"rollout_rs": "seq_mean_k3,token_k1", "rollout_rs_threshold": "1,2,3"}, "3 thresholds"),
        ({"rollout_rs": "token_kpop"}, "rollout_rs_threshold=0.1"),
        ({"rollout_rs": "token_kpop", "rollout_rs_threshold": "0.1_2.0"}, "rollout_rs_threshold=2.0"),
        ({"rollout_rs": "token_kpop", "rollout_rs_threshold": "phi"}, "rollout_rs_threshold=0.1"),
        ({"rollout_rs": "binary_kl", "rollout_rs_threshold": 2.0}, "rollout_rs=token_kpop"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold=2.0"),
        ({"rollout_token_veto_threshold": 1.5}, "rollout_token_veto_threshold=1.5"),
        ({"rollout_token_veto_threshold": 0}, "rollout_token_veto_threshold: '0'"),
        ({"loss_type": "ppo", "bypass_mode": True}, "ppo_clip"),
        ({"loss_type": "reinforce"}, "bypass_mode=true"),
        ({"bypass_mode": True, "rollout_is": "token"}, "loss_type=reinforce"),
        (
            {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize=false",
        ),
    ],
)
def test_a_wrong_setting_is_explained(wrong: dict, mention: str) -> None:
    with raises(ConfigError, mention, "Fix:", where="algorithm.rollout_correction"):
        check_rollout_correction(**wrong)


def test_shapes_that_differ_are_refused() -> None:
    with raises(ValueError, "(2, 3)", "(2, 4)"):
        rollout_correction(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4))


def test_the_peers_preset_names_are_all_there() -> None:
    peers = [
        "decoupled_token_is",
        "decoupled_seq_is",
        "decoupled_token_icepop",
        "decoupled_seq_is_rs",
        "decoupled_geo_rs",
        "decoupled_geo_rs_seq_tis",
        "decoupled_geo_rs_token_tis",
        "decoupled_k3_rs",
        "decoupled_k3_rs_seq_tis",
        "decoupled_k3_rs_token_tis",
        "bypass_ppo_clip",
        "bypass_ppo_clip_geo_rs",
        "bypass_ppo_clip_k3_rs",
        "bypass_pg_is",
        "bypass_pg_token_icepop",
        "bypass_pg_geo_rs",
        "bypass_pg_geo_rs_seq_tis",
        "bypass_pg_geo_rs_token_tis",
        "disabled",
    ]
    assert set(peers) <= set(ROLLOUT_CORRECTION_PRESETS)
    for name, chosen in ROLLOUT_CORRECTION_PRESETS.items():
        assert chosen["bypass_mode"] == name.startswith("bypass"), name
        assert (chosen["loss_type"] == "reinforce") == name.startswith("bypass_pg"), name
        assert (chosen["rollout_rs"] is not None) == ("_rs" in name or "kpop" in name), name
