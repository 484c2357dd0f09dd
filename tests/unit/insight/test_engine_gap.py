"""The verdict over an engine's mismatch: every threshold is a declared metric, and each one counts."""

from __future__ import annotations

import math

import pytest

from hone.apps.lab.mismatch import THRESHOLDS, Threshold, Verdict, judge
from hone.insight.metrics import find_metric


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda threshold: threshold.metric)
def test_each_threshold_is_of_a_declared_metric_and_decides(threshold: Threshold) -> None:
    assert find_metric(threshold.metric) is not None and threshold.look < threshold.act
    for value, expected in (
        (threshold.look * 0.99, Verdict.GOOD),
        (threshold.look, Verdict.LOOK),
        (-threshold.look, Verdict.LOOK),
        (threshold.act, Verdict.BAD),
        (math.nan, Verdict.BAD),
    ):
        verdict, reasons = judge({threshold.metric: value})
        assert verdict is expected and len(reasons) == (expected is not Verdict.GOOD)


def test_the_worst_counts_whatever_the_order() -> None:
    values = [threshold.act if number == 1 else threshold.look for number, threshold in enumerate(THRESHOLDS)]
    named = dict(zip((threshold.metric for threshold in THRESHOLDS), values, strict=True))
    assert judge(named)[0] is Verdict.BAD and len(judge(named)[1]) == len(THRESHOLDS)
