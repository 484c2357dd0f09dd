"""Histories of metrics that detectors compare with."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median, pstdev

__all__ = ["Baseline", "Reward", "Streak", "fmean", "median", "pstdev", "rose", "window"]

SOLVED = 0.9  # share of the range of seen scores above which a task counts as solved. Proposal of Hone

GAIN = 0.1  # share of that range by which a reward that rises gains over a window. Proposal of Hone


def window(size: int) -> deque[float]:
    return deque(maxlen=size)


def rose(values: Sequence[float]) -> bool:
    """Return whether the mean of the second half exceeds that of the first by more than the standard error of the difference."""
    half = len(values) // 2
    if half < 2:
        return False
    first, second = values[:half], values[-half:]
    error = math.sqrt((pstdev(first) ** 2 + pstdev(second) ** 2) / (half - 1))
    return fmean(second) - fmean(first) > error


class Streak:
    """Number of consecutive steps for which a condition holds."""

    def __init__(self) -> None:
        self.length = 0

    def add(self, holds: bool) -> int:
        self.length = self.length + 1 if holds else 0
        return self.length


class Baseline:
    """Mean of the first values of a run, frozen afterwards."""

    def __init__(self, size: int = 20) -> None:
        self._size, self._values = size, list[float]()

    def add(self, value: float) -> bool:
        """Add a value while the baseline is open; return whether it was complete before."""
        if len(self._values) >= self._size:
            return True
        if math.isfinite(value):
            self._values.append(value)
        return False

    @property
    def mean(self) -> float:
        return fmean(self._values) if self._values else 0.0


class Reward:
    """Level and trend of the score over the latest steps."""

    def __init__(self, size: int) -> None:
        self.means = window(size)
        self.lowest, self.highest = math.inf, -math.inf

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the scores of a step, if it has any."""
        if "critic/score/mean" not in metrics:
            return
        mean = metrics["critic/score/mean"]
        self.means.append(mean)
        self.lowest = min(self.lowest, metrics.get("critic/score/min", mean))
        self.highest = max(self.highest, metrics.get("critic/score/max", mean))

    @property
    def rises(self) -> bool:
        """True if the mean score rose over the window: by halves, or from the first to the last quarter by a tenth of the range."""
        values, quarter = list(self.means), len(self.means) // 4
        gain = fmean(values[-quarter:]) - fmean(values[:quarter]) if quarter else 0.0
        return rose(values) or gain > GAIN * (self.highest - self.lowest) > 0

    @property
    def falls(self) -> bool:
        return rose([-mean for mean in self.means])

    @property
    def solved(self) -> bool:
        """True if the mean score of the latest steps is near the best score that a response ever had."""
        latest = list(self.means)[-5:]
        return bool(latest) and fmean(latest) >= self.lowest + SOLVED * (self.highest - self.lowest) > self.lowest

    @property
    def change(self) -> str:
        """Return the mean score of the first and of the second half of the window as text."""
        values, half = list(self.means), len(self.means) // 2
        return f"{fmean(values[:half]):.3g} -> {fmean(values[half:]):.3g}" if half else "unknown"
