"""Declaration of a metric."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """Rule that reduces several values of one step to one number."""

    SUM = "sum"
    MEAN = "mean"
    """Weighted by tokens or sequences, as given by the caller."""
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True)
class MetricSpec:
    """The declaration of one metric.

    Attributes:
        name: exact name, or a pattern with ``<placeholders>``.
        unit: unit of the value.
        reduction: rule that combines the values of one step.
        meaning: description in a sentence.
    """

    name: str
    unit: str
    reduction: Reduction
    meaning: str
