"""Detectors of problems in the metrics of a run; docs/detectors.md lists them."""

from __future__ import annotations

from collections.abc import Iterable

from hone.insight.detectors.base import Alert, Cause, Detector, Settings, render_alert
from hone.insight.detectors.learning import (
    ClipFraction,
    CriticLag,
    EngineMismatch,
    EntropyCollapse,
    EntropyRise,
    GradientSpike,
    PolicyKL,
    RatioExplosion,
    ReferenceKL,
    ResponseLength,
    ZeroGradient,
)
from hone.insight.detectors.rewards import (
    AdvantageShift,
    FlatReward,
    MemoryGrowth,
    RewardHacking,
    SlowSteps,
    ToolCalls,
    ZeroReward,
)

__all__ = ["DETECTORS", "Alert", "Cause", "Detector", "build_detectors", "render_alert"]

DETECTORS: tuple[type[Detector], ...] = (
    ZeroReward,
    FlatReward,
    ZeroGradient,
    RatioExplosion,
    ClipFraction,
    PolicyKL,
    ReferenceKL,
    EntropyCollapse,
    EntropyRise,
    ResponseLength,
    GradientSpike,
    EngineMismatch,
    CriticLag,
    AdvantageShift,
    RewardHacking,
    ToolCalls,
    SlowSteps,
    MemoryGrowth,
)
"""All detectors, in the order in which their alerts are reported."""


def build_detectors(settings: Settings, ignore: Iterable[str] = ()) -> list[Detector]:
    left_out = set(ignore)
    return [detector(settings) for detector in DETECTORS if detector.name not in left_out]
