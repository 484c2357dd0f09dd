"""What a part of the check found: named values with bounds, as JSON and as a line of the report."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["passed", "failed", "no GPU", "not run"]


@dataclass
class Value:
    """A measured value.

    Attributes:
        name: what was measured.
        value: the number.
        unit: of the number.
        least: smallest value that passes; None for no bound.
        most: largest value that passes; None for no bound.
    """

    name: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def passed(self) -> bool:
        """True for a finite value within its bounds."""
        return (
            math.isfinite(self.value)
            and (self.least is None or self.value >= self.least)
            and (self.most is None or self.value <= self.most)
        )

    def line(self) -> str:
        """Return the value and its bounds in words."""
        bounds = [f"at least {self.least:g}"] if self.least is not None else []
        bounds += [f"at most {self.most:g}"] if self.most is not None else []
        return f"{self.name}: {self.value:.4g} {self.unit}".rstrip() + (f" ({', '.join(bounds)})" if bounds else "")


@dataclass
class Result:
    """The result of a part.

    Attributes:
        part: name of the part.
        device: what it ran on.
        values: what was measured.
        notes: what was left out, and fallbacks that were used.
        problems: what went wrong.
        seconds: wall time.
    """

    part: str
    device: str
    status: Status = "passed"
    values: list[Value] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(
        self, name: str, value: float, unit: str = "", *, least: float | None = None, most: float | None = None
    ) -> None:
        """Record a value; one outside its bounds is a problem."""
        self.values.append(Value(name, float(value), unit, least, most))
        if not self.values[-1].passed:
            self.problems.append(self.values[-1].line())

    def write(self, folder: Path) -> None:
        """Write `<part>.json`."""
        if self.problems:
            self.status = "failed"
        (folder / f"{self.part}.json").write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_result(folder: Path, part: str) -> Result | None:
    """Return the result that a part wrote, or None."""
    path = folder / f"{part}.json"
    if not path.exists():
        return None
    raw = json.loads(path.read_text())
    return Result(**{**raw, "values": [Value(**value) for value in raw["values"]]})
