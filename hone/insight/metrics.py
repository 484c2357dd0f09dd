"""Metrics: every name is declared once, with its unit, its reduction and its meaning.

The table is ``metric_table.yaml``, from which ``docs/metrics.md`` is generated. A :class:`MetricStore` collects values during
a step and reduces them by the declared rule, independent of the name. Importing this module does not load torch.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hone.errors import did_you_mean
from hone.text import read_yaml


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


_TABLE = read_yaml(Path(__file__).with_name("metric_table.yaml").read_text(encoding="utf-8"))
GROUPS = {
    title: tuple(MetricSpec(name, unit, Reduction(rule), meaning) for name, (unit, rule, meaning) in rows.items())
    for title, rows in _TABLE.items()
}
"""The table in sections, as documented."""

METRICS = tuple(spec for group in GROUPS.values() for spec in group)

TIMING_PREFIXES = (
    "timing_s/", "perf/time_per_step", "perf/throughput", "perf/driver_overhead_ratio", "perf/idle/", "agent_loop/",
    "replica/", "insight/alerts/machine", "perf/cpu_memory_used_gb", "perf/max_memory_allocated_gb",
)  # fmt: skip
"""Prefixes of metrics of wall time and memory, of replicas, which take work as they become free, and of alerts about time and
memory. Only these differ between two runs of one seed."""


def is_timing(name: str) -> bool:
    """Return whether ``name`` measures wall time or memory, and so differs between two otherwise identical runs."""
    return name.startswith(TIMING_PREFIXES)


@functools.cache
def find_metric(name: str) -> MetricSpec:
    """Return the declaration of the metric called ``name``: the exact one, else the first matching pattern. Raises
    ValueError: no declaration matches.
    """
    if name in _EXACT:
        return _EXACT[name]
    for pattern, spec in _PATTERNS:
        if pattern.fullmatch(name):
            return spec
    raise ValueError(
        f"metric '{name}' is not declared; add it to hone/insight/metric_table.yaml or call declare(). "
        f"{did_you_mean(name, _EXACT)}"
    )


def declare(spec: MetricSpec) -> None:
    """Declare one more metric, for an estimator, a loss or a stage from outside Hone.

    Raises ValueError: the name already has another declaration.
    """
    if _EXACT.get(spec.name, spec) != spec or any(
        declared.name == spec.name and declared != spec for _, declared in _PATTERNS
    ):
        raise ValueError(f"metric '{spec.name}' already has another declaration")
    if "<" in spec.name:
        _PATTERNS.append((_compile(spec.name), spec))
    else:
        _EXACT[spec.name] = spec
    find_metric.cache_clear()


def is_declared(name: str) -> bool:
    """Return whether :func:`find_metric` has a declaration of ``name``."""
    return name in _EXACT or any(pattern.fullmatch(name) for pattern, _ in _PATTERNS)


def _compile(name: str) -> re.Pattern[str]:
    """Compile ``a/<x>/b@<n>`` to a pattern: ``<n>`` is a number, every other placeholder any text."""
    segments = re.split(r"(<\w+>)", name)
    return re.compile("".join(r"\d+" if p == "<n>" else ".+" if p.startswith("<") else re.escape(p) for p in segments))


_EXACT = {spec.name: spec for spec in METRICS if "<" not in spec.name}
_PATTERNS = [(_compile(spec.name), spec) for spec in METRICS if "<" in spec.name]


class MetricStore:
    """Values of one step, reduced by the rules of the table.

    >>> store = MetricStore()
    >>> store.add("actor/pg_loss", 1.0, weight=3)
    >>> store.add("actor/pg_loss", 5.0, weight=1)
    >>> store.add("response_length/max", 7)
    >>> store.add("response_length/max", 4)
    >>> store.reduce()
    {'actor/pg_loss': 2.0, 'response_length/max': 7.0}

    Sums and means do not depend on the order of the values: they are rounded once, at the end.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[Any, float]]] = {}

    def add(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Add one observation.

        Args:
            name: a declared metric.
            value: a number or a tensor of one element. A tensor on an accelerator is copied on its device and read only in
                :meth:`reduce`, so that adding never waits for the device.
            weight: number of tokens or sequences that the value covers; used by means only. Weight 0 has no effect.

        Raises:
            ValueError: the name is not declared, the value is not a single number, or the weight is negative.
        """
        find_metric(name)
        weight = float(weight)
        if not weight >= 0:
            raise ValueError(f"metric '{name}' has the weight {weight}, not a number of at least 0")
        self._values.setdefault(name, []).append((_stored(name, value), weight))

    def update(self, metrics: dict[str, Any], weight: float = 1.0) -> None:
        for name, value in metrics.items():
            self.add(name, value, weight)

    @contextmanager
    def timer(self, stage: str) -> Iterator[None]:
        """Add the wall time of the block, in seconds, to ``timing_s/<stage>``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(f"timing_s/{stage}", time.perf_counter() - start)

    def merge(self, other: MetricStore) -> None:
        for name, observations in other._values.items():
            self._values.setdefault(name, []).extend(observations)

    def reduce(self) -> dict[str, float]:
        """Return one number per metric, sorted by name. A mean whose weights are all 0 is left out."""
        reduced = {}
        for name in sorted(self._values):
            pairs = [(float(value), weight) for value, weight in self._values[name]]
            value = _REDUCE[find_metric(name).reduction](pairs)
            if value is not None:
                reduced[name] = value
        return reduced

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __len__(self) -> int:
        return len(self._values)


def _stored(name: str, value: Any) -> Any:
    """Return a float, or a detached copy of a one-element tensor on an accelerator."""
    if hasattr(value, "detach"):
        if value.numel() != 1:
            raise ValueError(f"metric '{name}' has a tensor of shape {tuple(value.shape)}, not a single number")
        return float(value.detach()) if value.device.type == "cpu" else value.detach().clone()
    return float(value)


def _sum(values: list[float]) -> float:
    # fsum raises for infinities of both signs; their IEEE sum is nan
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _weighted_mean(pairs: list[tuple[float, float]]) -> float | None:
    pairs = [(value, weight) for value, weight in pairs if weight > 0]
    if not pairs:
        return None
    if len(pairs) == 1:
        return pairs[0][0]
    return _sum([value * weight for value, weight in pairs]) / _sum([weight for _, weight in pairs])


def _extreme(pairs: list[tuple[float, float]], pick: Any) -> float:
    values = [value for value, _ in pairs]
    return math.nan if any(map(math.isnan, values)) else pick(values)


_REDUCE: dict[Reduction, Any] = {
    Reduction.SUM: lambda pairs: _sum([value for value, _ in pairs]),
    Reduction.MEAN: _weighted_mean,
    Reduction.MAX: lambda pairs: _extreme(pairs, max),
    Reduction.MIN: lambda pairs: _extreme(pairs, min),
    Reduction.LAST: lambda pairs: pairs[-1][0],
}
