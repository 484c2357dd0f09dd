"""Validation statistics against enumeration of every draw."""

import itertools
import math
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises

from hone.insight.metrics import find_metric
from hone.trainers.validation import best_of, majority, subset_sizes, validation_metrics

VALUES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -2.0]), min_size=1, max_size=7)


@given(VALUES, st.data())
def test_best_of_is_the_mean_over_all_subsets(values, data):
    k = data.draw(st.integers(1, len(values)))
    draws = [max(subset) for subset in itertools.combinations(values, k)]
    assert best_of(values, k) == pytest.approx(statistics.fmean(draws), abs=1e-12)


def test_best_of_binary_scores_is_pass_at_k():
    n, correct = 10, 3
    for k in range(1, 11):
        expected = 1 - math.comb(n - correct, k) / math.comb(n, k)
        assert best_of([1.0] * correct + [0.0] * (n - correct), k) == pytest.approx(expected, abs=1e-12)


@examples(40)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.5]), st.sampled_from("abc")), min_size=1, max_size=5), st.data())
def test_majority_is_the_mean_over_all_draws_in_all_orders(rows, data):
    """The first seen among the most frequent wins and its first response gives the score, averaged over orders."""
    k = data.draw(st.integers(1, len(rows)))
    scores = []
    for draw in itertools.permutations(rows, k):
        counts = Counter(pred for _, pred in draw)
        winner = next(pred for _, pred in draw if counts[pred] == max(counts.values()))
        scores.append(next(value for value, pred in draw if pred == winner))
    assert majority([v for v, _ in rows], [p for _, p in rows], k) == pytest.approx(statistics.fmean(scores), abs=1e-12)


def test_majority_of_many_responses_is_quick_and_sane():
    preds = [str(i % 20) for i in range(64)]
    values = [1.0 if pred == "0" else 0.0 for pred in preds]
    assert 0 < majority(values, preds, 8) < 0.2
    assert majority([1.0] * 40 + [0.0] * 24, ["yes"] * 40 + ["no"] * 24, 64) == 1.0


def test_names_and_values_by_data_source():
    metrics = validation_metrics(
        ["m", "m", "m", "m", "q", "q"],
        ["1", "1", "2", "2", "3", "3"],
        {
            "reward": [1.0, 0.0, 1.0, 1.0, 0.5, 0.1],
            "acc": [True, False, True, True, None, None],
            "pred": ["7", "8", "9", "9", "x", "x"],
        },
        n=2,
    )
    assert metrics["val-core/m/acc/mean@2"] == 0.75
    assert metrics["val-core/m/acc/best@2/mean"] == 1.0
    assert metrics["val-core/m/acc/maj@2/mean"] == 0.75  # a tie at problem 1, unanimous at problem 2
    assert metrics["val-aux/m/acc/std@2"] == 0.25
    assert metrics["val-aux/m/acc/worst@2/mean"] == 0.5
    assert metrics["val-aux/m/reward/mean@2"] == 0.75  # not core: the source has acc
    assert metrics["val-core/q/reward/mean@2"] == pytest.approx(0.3)  # core: it has none
    assert not any(name.startswith(("val-core/q/acc", "val-aux/q/acc")) or "/pred/" in name for name in metrics)
    assert list(metrics) == sorted(metrics)
    for name in metrics:
        assert find_metric(name)


def test_problems_weigh_equally_and_order_does_not_matter():
    rows = [("s", str(i // 4), float(i % 3), i) for i in range(16)]
    shuffled = rows[::-1]

    def run(rows):
        return validation_metrics([r[0] for r in rows], [r[1] for r in rows], {"reward": [r[2] for r in rows]}, 4)

    assert run(rows) == pytest.approx(run(shuffled))
    assert run(rows)["val-core/s/reward/mean@4"] == pytest.approx(statistics.fmean(r[2] for r in rows))


def test_one_response_a_problem_gives_only_the_mean():
    assert validation_metrics(["s", "s"], ["1", "2"], {"reward": [1, 0], "note": ["a", "b"]}, 1) == {
        "val-core/s/reward/mean@1": 0.5
    }


def test_same_uid_in_two_sources_is_two_problems():
    metrics = validation_metrics(["a", "b"], ["1", "1"], {"reward": [1.0, 0.0]}, 1)
    assert metrics == {"val-core/a/reward/mean@1": 1.0, "val-core/b/reward/mean@1": 0.0}


def test_missing_values_shrink_the_problem():
    metrics = validation_metrics(["s"] * 3, ["1"] * 3, {"reward": [1.0, None, 0.0]}, 3)
    assert metrics["val-core/s/reward/mean@3"] == 0.5
    assert metrics["val-core/s/reward/best@3/mean"] == 1.0


def test_wrong_shapes_are_refused():
    with raises(ValueError, "1 problems of 's'", "2 responses"):
        validation_metrics(["s"] * 3, ["1", "1", "2"], {"reward": [1, 1, 1]}, 2)
    with raises(ValueError, "'acc': 1"):
        validation_metrics(["s", "s"], ["1", "2"], {"acc": [1]}, 1)


def test_empty_validation_is_empty():
    assert validation_metrics([], [], {"reward": []}, 4) == {}


@given(st.integers(1, 200))
def test_subset_sizes(n):
    sizes = subset_sizes(n)
    assert sizes[-1] == n and sizes == sorted(set(sizes))
    assert all(size & (size - 1) == 0 for size in sizes[:-1])
