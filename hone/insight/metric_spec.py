"""Declaration of a metric."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """Rule that reduces several values of one step to one number."""

    SUM = "sum"
    MEAN = "mean"  # weighted by tokens or sequences, as given by the caller
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True)
class MetricSpec:
    """The declaration of one metric."""

    name: str  # exact name, or a pattern with ``<placeholders>``
    unit: str
    reduction: Reduction
    meaning: str
