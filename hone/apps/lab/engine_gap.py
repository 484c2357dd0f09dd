"""Judge the distance between an engine's log-probs and the trainer's: thresholds, and a verdict over metrics.

Thresholds are from verl's FAQ and its page on rollout correction (``rollout_probs_diff_mean``, KL, chi2), the documentation of
the TRL trainers (ratios "should float around 1"), and runs of Hone (``ratio_outside``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Consequence of the measured numbers for training."""

    GOOD = "good"
    LOOK = "look"
    """Train with importance correction, and watch the gap."""
    BAD = "bad"
    """Fix it before training: gradients would be of another policy than the one that sampled."""


@dataclass(frozen=True)
class Threshold:
    """Sizes of a metric above which to look, and to act."""

    metric: str
    look: float
    act: float


THRESHOLDS = (
    Threshold("training/rollout_probs_diff_mean", 0.005, 0.01),
    Threshold("training/rollout_log_probs_diff_mean", 0.02, 0.1),
    Threshold("rollout_corr/kl", 0.01, 0.1),
    Threshold("rollout_corr/k3_kl", 0.01, 0.1),
    Threshold("rollout_corr/chi2_token", 0.1, 1.0),
    Threshold("rollout_corr/ratio_outside", 0.001, 0.01),
)


def judge(metrics: Mapping[str, float]) -> tuple[Verdict, list[str]]:
    """Return the verdict over metrics by name, and its reasons in words.

    >>> judge({"training/rollout_probs_diff_mean": 0.002})
    (<Verdict.GOOD: 'good'>, [])
    >>> judge({"rollout_corr/kl": -0.2})
    (<Verdict.BAD: 'bad'>, ['rollout_corr/kl is -0.2; 0.1 or more: act'])
    """
    verdict, reasons = Verdict.GOOD, []
    for threshold in THRESHOLDS:
        value = metrics.get(threshold.metric, 0.0)
        if not abs(value) < threshold.look:  # true for nan too
            act = not abs(value) < threshold.act
            verdict = Verdict.BAD if act or verdict is Verdict.BAD else Verdict.LOOK
            level, name = (threshold.act, "act") if act else (threshold.look, "look")
            reasons.append(f"{threshold.metric} is {value:.3g}; {level:g} or more: {name}")
    return verdict, reasons
