"""What the declaration of a metric holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """How several values of one step become one number."""

    SUM = "sum"
    MEAN = "mean"
    """Weighted by tokens or sequences, whichever the caller gives."""
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True)
class MetricSpec:
    """The declaration of one metric.

    Attributes:
        name: exact name, or a pattern with ``<placeholders>``.
        unit: what one unit of the value is.
        reduction: how values of one step are combined.
        meaning: what it says, in a sentence.
        alarm: when to look, and at what first; empty when no value is alarming by itself.
    """

    name: str
    unit: str
    reduction: Reduction
    meaning: str
    alarm: str = ""
