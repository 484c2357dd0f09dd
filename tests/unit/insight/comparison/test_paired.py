"""Paired differences: pairing, intervals, and the number of seeds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from hone.apps.lab.paired import (
    Verdict,
    bootstrap_interval,
    compare_paired,
    pair_scores,
    seeds_needed,
    student_cdf,
    student_quantile,
)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [
        (1, 12.70620),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (9, 2.26216),
        (30, 2.04227),
        (100, 1.98397),
        (1000, 1.96234),
    ],
)
def test_quantiles_of_t_are_those_of_the_tables(degrees, quantile):
    assert student_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-5)
    assert student_quantile(0.025, degrees) == pytest.approx(-quantile, abs=1e-5)
    assert student_cdf(quantile, degrees) == pytest.approx(0.975, abs=1e-6)


def test_pairs_have_what_both_arms_have():
    first = {"1": {"a": 1.0, "b": 0.0}, "2": {"a": 0.0, "c": 1.0}, "3": {"a": 1.0}}
    second = {"2": {"a": 1.0, "b": 1.0, "c": 1.0}, "1": {"b": 1.0}, "4": {"a": 1.0}}
    paired = pair_scores(first, second)
    assert paired.seeds == ("1", "2") and paired.prompts == ("b", "a", "c")
    np.testing.assert_array_equal(paired.differences, [[1, math.nan, math.nan], [math.nan, 1, 0]])
    assert paired.seed_means() == [1.0, 0.5]
    result = compare_paired(paired)
    assert (result.first, result.second, result.difference) == (pytest.approx(1 / 3), 1.0, pytest.approx(2 / 3))
    with pytest.raises(ValueError, match="no seed"):
        pair_scores({"1": {"a": 1.0}}, {"1": {"b": 1.0}})


@given(
    st.lists(st.lists(st.floats(-1, 1), min_size=4, max_size=4), min_size=2, max_size=5),
    st.floats(-10, 10),
    st.floats(0.1, 10),
)
@examples(20)
def test_the_interval_moves_and_scales_with_the_scores(rows, shift, scale):
    values = np.array(rows)
    low, high = bootstrap_interval(values, draws=200)
    moved = bootstrap_interval(values * scale + shift, draws=200)
    assert moved == pytest.approx((low * scale + shift, high * scale + shift), abs=1e-6)
    assert low - 1e-12 <= values.mean() <= high + 1e-12


def test_less_is_better_exchanges_the_verdict():
    values = np.random.default_rng(0).normal(0.3, 0.1, (4, 20))
    scores = pair_scores(*_as_scores(values))
    assert compare_paired(scores).verdict is Verdict.SECOND_BETTER
    assert compare_paired(scores, more_is_better=False).verdict is Verdict.FIRST_BETTER
    noise = pair_scores(*_as_scores(values - values.mean()))
    assert compare_paired(noise).verdict is compare_paired(noise, more_is_better=False).verdict is Verdict.WITHIN_NOISE


def _as_scores(values):
    zero = {str(seed): {str(prompt): 0.0 for prompt in range(len(row))} for seed, row in enumerate(values)}
    return zero, {str(seed): {str(p): float(value) for p, value in enumerate(row)} for seed, row in enumerate(values)}


def test_one_number_per_arm_has_no_interval():
    assert all(math.isnan(end) for end in bootstrap_interval(np.array([[0.3]])))
    assert compare_paired(pair_scores({"1": {"": 0.0}}, {"1": {"": 0.5}})).verdict is Verdict.WITHIN_NOISE


def test_many_seeds_give_the_interval_of_t():
    values = np.random.default_rng(0).normal(0.1, 1.0, (40, 1))
    low, high = bootstrap_interval(values)
    half = student_quantile(0.975, 39) * values.std(ddof=1) / math.sqrt(40)
    assert (high - low) / 2 == pytest.approx(half, rel=0.06)


@pytest.mark.parametrize(("seeds", "prompts"), [(1, 80), (3, 40), (6, 40)])
def test_intervals_hold_the_truth_at_their_level(seeds, prompts):
    """Differences of equal arms, with noise of seeds, of prompts and of single answers."""
    generator, inside = np.random.default_rng(seeds), 0
    for _ in range(200):
        by_seed = generator.normal(0, 0.05, (seeds, 1)) if seeds > 1 else 0.0
        noise = generator.normal(0, 0.2, (1, prompts)) + generator.normal(0, 0.4, (seeds, prompts))
        low, high = bootstrap_interval(by_seed + noise, draws=500)
        inside += low <= 0 <= high
    assert inside >= 182  # 95 % of 200 less two standard errors


def test_the_seeds_needed_have_the_stated_power():
    means = [0.02, 0.08, 0.05, -0.01, 0.06]
    effect, spread = 0.05, float(np.std(means, ddof=1))
    count = seeds_needed(means, effect)
    assert count is not None and seeds_needed(means, 2 * effect) < count < seeds_needed(means, effect / 2)
    draws = np.random.default_rng(0).normal(effect, spread, (20_000, count))
    t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(count))
    assert 0.77 < (np.abs(t) > student_quantile(0.975, count - 1)).mean() < 0.9
    assert seeds_needed(means[:1], effect) is None and seeds_needed(means, 0.0) is None
    assert seeds_needed([0.1, 0.1], effect) == 2
