"""Detector of a problem in the metrics of a run, and its alert.

A detector examines every step. The first step that shows its symptom opens an episode and gives one alert. The episode ends after
``cool_down`` steps without the symptom; only then can the detector give another alert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

Settings = Mapping[str, Any]  # configuration of a run, flat: dotted key to value
Metrics = Mapping[str, float]  # metrics of a step

WARNING, ERROR = "warning", "error"


@dataclass(frozen=True)
class Cause:
    """Likely cause of a symptom."""

    evidence: str  # what was measured, with numbers
    fix: str  # what to change, with the exact keys


@dataclass(frozen=True)
class Symptom:
    """Symptom in the metrics of a step."""

    severity: str  # ``warning`` or ``error``
    what: str  # the symptom, with figures
    causes: tuple[Cause, ...]  # likely causes, the most likely first


@dataclass(frozen=True)
class Alert:
    """Report of a detector."""

    detector: str
    step: int  # step that showed the symptom first
    severity: str  # ``warning`` or ``error``
    what: str  # the symptom, with figures
    why: str  # why it matters
    causes: tuple[Cause, ...]  # likely causes, the most likely first
    samples: tuple[Mapping[str, Any], ...] = ()  # step, uid and index of samples to look at, in the archive

    @property
    def fix(self) -> str:
        return self.causes[0].fix

    def record(self) -> dict[str, Any]:
        """Return the alert as an object of ``alerts.jsonl``, without its step."""
        return {
            "detector": self.detector,
            "severity": self.severity,
            "what": self.what,
            "why": self.why,
            "causes": [f"{cause.evidence}. Fix: {cause.fix}" for cause in self.causes],
            "fix": self.fix,
            "samples": [dict(sample) for sample in self.samples],
        }


def render_alert(record: Mapping[str, Any], run: str = "RUN") -> str:
    """Return an object of ``alerts.jsonl`` as text, with the command that shows its samples. ``run``: run directory, or
    its name.
    """
    lines = [f"alert, step {record['step']}, {record['detector']} ({record['severity']}): {record['what']}."]
    lines.append(f"  Why it matters: {record['why']}")
    lines += [f"  {number}. {cause}" for number, cause in enumerate(record["causes"], 1)]
    if record["samples"]:
        first = record["samples"][0]
        lines.append(f"  Samples: hone runs samples {run} --step {first['step']} --uid {first['uid']}")
    return "\n".join(lines)


class Detector(ABC):
    """Detector of one symptom."""

    name: ClassVar[str]  # name in ``insight.stop_on`` and ``insight.ignore``
    question: ClassVar[str]  # question of a user that it answers
    changes: ClassVar[str]  # what its alerts advise to change, in order, as Markdown
    # metrics that decide whether it fires; steps that have none of them are not counted
    reads: ClassVar[tuple[str, ...]]
    fires: ClassVar[str]  # figures at which it fires, with their source
    why: ClassVar[str]  # why the symptom matters
    warm_up: ClassVar[int] = 0  # steps before it can fire, counted from the start of the run
    cool_down: ClassVar[int] = 20  # steps without the symptom that end an episode
    columns: ClassVar[tuple[str, ...]] = ("score",)  # columns of the archive that :meth:`concern` reads

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._steps = 0
        self._absent = self.cool_down

    def observe(self, step: int, metrics: Metrics) -> Alert | None:
        """Read the metrics of a step; return an alert if an episode begins."""
        if not any(name in metrics for name in self.reads):
            return None
        self._steps += 1
        symptom = self.examine(metrics)
        if symptom is None or self._steps <= self.warm_up:
            self._absent += 1
            return None
        begins, self._absent = self._absent >= self.cool_down, 0
        if not begins:
            return None
        return Alert(self.name, step, symptom.severity, symptom.what, self.why, symptom.causes)

    def state(self) -> dict[str, Any]:
        """Return what it has seen as values of JSON, for a checkpoint."""
        return {name: _plain(value) for name, value in vars(self).items() if name != "settings"}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`; what a detector of another version has seen is left out."""
        for name in state.keys() & (vars(self).keys() - {"settings"}):
            setattr(self, name, _restored(getattr(self, name), state[name]))

    @abstractmethod
    def examine(self, metrics: Metrics) -> Symptom | None:
        """Add the metrics of a step to the history, and return the symptom that they show."""

    def concern(self, record: Mapping[str, Any]) -> float:
        """Return how much a sample of the archive illustrates the symptom; the default prefers low scores."""
        return -(record["score"] or 0.0)


def _plain(value: Any) -> Any:
    """Return a part of a detector as values of JSON: histories become lists, objects become their fields."""
    if isinstance(value, (deque, list, tuple)):
        return [_plain(item) for item in value]
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return value if fields is None else {name: _plain(item) for name, item in fields.items()}


def _restored(fresh: Any, value: Any) -> Any:
    """Return a part of a new detector with a saved value."""
    if isinstance(fresh, deque):
        return deque(value, fresh.maxlen)
    if isinstance(fresh, dict):
        return {name: _restored(fresh.get(name), item) for name, item in value.items()}
    if hasattr(fresh, "__dict__"):
        for name, item in value.items():
            setattr(fresh, name, _restored(getattr(fresh, name), item))
        return fresh
    return value
