"""Bias of dropped prompts: planted ones are named, healthy runs are silent, and the numbers agree with slow code."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from support.coverage_runs import Drop, changed, invented

from hone.apps.lab.coverage import Comparison, bias_words, compare_dropped
from hone.insight.coverage import EQUAL_ANSWERS, EndedDraw

pytestmark = pytest.mark.application("hone/insight/coverage.py", "hone/apps/lab")


def chance(share: float) -> Drop:
    return lambda random, draw: "failed" if random.random() < share else None


PLANTED: dict[str, Drop] = {
    "tokens": lambda random, draw: "too_old" if random.random() < 0.3 and draw.tokens > 120 else None,
    "prompt_tokens": lambda random, draw: "failed" if random.random() < 0.3 and draw.prompt_tokens < 120 else None,
    "reward": lambda random, draw: "failed" if random.random() < 0.4 and draw.reward < 0.4 else None,
    "source": lambda random, draw: "failed" if random.random() < (0.4 if draw.source == "code" else 0.03) else None,
}
SIGN = {"tokens": 1, "prompt_tokens": -1, "reward": -1, "source": 1}


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("characteristic", list(PLANTED))
def test_a_planted_bias_is_named_and_nothing_else(characteristic: str, epochs: int) -> None:
    for seed in range(3):
        draws = invented(seed, PLANTED[characteristic], rows=400, epochs=epochs)
        (biased,) = [comparison for comparison in compare_dropped(draws).comparisons if comparison.biased]
        assert biased.characteristic == characteristic
        assert np.sign(biased.effect) == SIGN[characteristic]


HEALTHY: dict[str, tuple[Drop, dict[str, int]]] = {
    "one epoch": (chance(0.1), {"rows": 400}),
    "few drops": (chance(0.05), {"rows": 150}),
    "several epochs": (chance(0.1), {"rows": 80, "epochs": 5}),
    "the same prompts in every epoch": (lambda _, draw: "failed" if draw.row < 7 else None, {"rows": 70, "epochs": 8}),
    "drops that become rare while answers grow": (
        lambda random, draw: "failed" if random.random() < 0.6 * 0.97**draw.step else None,
        {"rows": 2000, "growth": 4},
    ),
}


@pytest.mark.parametrize("kind", list(HEALTHY))
def test_healthy_runs_are_silent(kind: str) -> None:
    drop, shape = HEALTHY[kind]
    for seed in range(20):
        report = compare_dropped(invented(seed, drop, **shape))
        assert report.dropped and len(report.comparisons) == 4
        assert not any(comparison.biased for comparison in report.comparisons)
        assert len(bias_words(report)) == 1


def test_p_values_are_uniform_without_a_bias() -> None:
    """The uncorrected test rejects as often as its level says, with prompts that recur."""
    drop = HEALTHY["the same prompts in every epoch"][0]
    smallest = [
        min(c.p for c in compare_dropped(invented(seed, drop, rows=70, epochs=4), permutations=500).comparisons)
        for seed in range(60)
    ]
    assert np.mean(np.array(smallest) < 0.05) <= 0.15  # the family's level is 0.05


def test_effect_and_p_agree_with_all_permutations() -> None:
    random = np.random.default_rng(5)
    tokens = np.round(random.normal(50, 10, 13)) + np.array([15] * 5 + [0] * 8)
    draws = [
        EndedDraw(1, i, i, 0, f"t:{i}", "a", "failed" if i < 5 else "trained", reason="x" if i < 5 else None, tokens=t)
        for i, t in enumerate(tokens.tolist())
    ]

    def delta(chosen: tuple[int, ...]) -> float:
        rest = [i for i in range(13) if i not in chosen]
        return float(np.mean([np.sign(tokens[a] - tokens[b]) for a in chosen for b in rest]))

    (comparison,) = compare_dropped(draws).comparisons
    observed = delta(tuple(range(5)))
    exact = np.mean([abs(delta(chosen)) >= abs(observed) - 1e-9 for chosen in combinations(range(13), 5)])
    assert comparison.effect == pytest.approx(observed)
    assert comparison.p == pytest.approx(exact, abs=0.006)
    assert (comparison.dropped_mean, comparison.trained_mean) == (tokens[:5].mean(), tokens[5:].mean())


def test_the_result_is_deterministic() -> None:
    draws = invented(1, PLANTED["tokens"])
    assert compare_dropped(draws) == compare_dropped(list(reversed(draws)))


def filtered_by_reward(seed: int, *, too_old: float) -> list[EndedDraw]:
    """Return a run with binary rewards whose groups of equal answers are filtered; some draws become too old before."""
    random = np.random.default_rng(seed)
    draws = []
    for draw in invented(seed, lambda random, draw: None, rows=600):
        reward = float(random.choice([0.0, 0.0, 0.0, 0.25, 0.5, 1.0]))
        fields = {name: getattr(draw, name) for name in EndedDraw.__slots__} | {"reward": reward}
        fresh = EndedDraw(**fields)
        if random.random() < too_old:
            draws.append(changed(fresh, "too_old"))
        else:
            draws.append(changed(fresh, "filtered", EQUAL_ANSWERS) if reward in (0.0, 1.0) else fresh)
    return draws


@pytest.mark.parametrize("too_old", [0.0, 0.2])
def test_a_difference_by_design_is_no_bias(too_old: float) -> None:
    for seed in range(5):
        report = compare_dropped(filtered_by_reward(seed, too_old=too_old))
        assert report.by_design > 100
        assert not any(comparison.biased for comparison in report.comparisons)
        tested = {(c.fate, c.characteristic) for c in report.comparisons}
        assert ("dropped", "reward") in tested if too_old else ("dropped", "reward") not in tested
        assert ("filtered", "reward") not in tested
        assert len(bias_words(report)) == 2  # silent, and the note that the difference is by design


def test_a_filter_with_another_reason_is_tested() -> None:
    draws = [
        changed(d, "filtered", "too easy") if d.reward > 0.6 else d for d in invented(2, lambda random, draw: None)
    ]
    assert [c.characteristic for c in compare_dropped(draws).comparisons if c.biased] == ["reward"]


def test_a_bias_of_one_fate_is_named_among_many_other_drops() -> None:
    def drop(random: np.random.Generator, draw: EndedDraw) -> str | None:
        if random.random() < 0.3:
            return "failed"
        return "too_old" if draw.tokens > 140 and random.random() < 0.25 else None

    for seed in range(3):
        report = compare_dropped(invented(seed, drop, rows=400, epochs=2))
        assert [(c.fate, c.characteristic) for c in report.comparisons if c.biased] == [("too_old", "tokens")]
        assert len(bias_words(report)) == 1


@pytest.mark.parametrize("drops", [0, 1, 4])
def test_too_few_drops_are_not_tested(drops: int) -> None:
    draws = invented(3, lambda random, draw: "failed" if draw.row < drops else None, rows=100, epochs=3)
    report = compare_dropped(draws)
    assert (report.dropped, report.comparisons) == (3 * drops, []) and len(bias_words(report)) == 1


def test_unknown_values_are_left_out() -> None:
    def without_values(draw: EndedDraw) -> EndedDraw:
        fields = {name: getattr(draw, name) for name in EndedDraw.__slots__}
        return EndedDraw(**{**fields, "reward": None, "tokens": None})

    draws = [without_values(d) if d.fate == "failed" else d for d in invented(4, chance(0.1))]
    comparisons: list[Comparison] = compare_dropped(draws).comparisons
    assert [comparison.characteristic for comparison in comparisons] == ["prompt_tokens", "source"]


def test_a_long_run_uses_a_bounded_sample() -> None:
    draws = invented(5, PLANTED["tokens"], rows=20_000)
    (biased,) = [c for c in compare_dropped(draws).comparisons if c.biased]
    assert biased.characteristic == "tokens" and biased.dropped + biased.trained == 20_000
