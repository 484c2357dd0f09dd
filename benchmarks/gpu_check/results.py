"""What a part of the check found: named values with bounds, as JSON after every value, and as lines of the report."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "needs a GPU", "not run"]


@dataclass
class Value:
    """A measured value.

    Attributes:
        name: what was measured.
        value: the number.
        unit: of the number.
        least: smallest value that passes; None for no bound.
        most: largest value that passes; None for no bound.
        ceiling: what the device reaches in the same unit, measured in the same call; None without one.
    """

    name: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None
    ceiling: float | None = None

    @property
    def passed(self) -> bool:
        """True for a finite value within its bounds."""
        return (
            math.isfinite(self.value)
            and (self.least is None or self.value >= self.least)
            and (self.most is None or self.value <= self.most)
        )

    def line(self) -> str:
        """Return the value, its share of the ceiling and its bounds in words."""
        bounds = [f"at least {self.least:g}"] if self.least is not None else []
        bounds += [f"at most {self.most:g}"] if self.most is not None else []
        share = f", {self.value / self.ceiling:.0%} of what the device reaches" if self.ceiling else ""
        return (
            f"{self.name}: {self.value:.4g} {self.unit}".rstrip()
            + share
            + (f" ({', '.join(bounds)})" if bounds else "")
        )


@dataclass
class Result:
    """The result of a part.

    Attributes:
        part: name of the part.
        device: what it runs on: cuda or cpu.
        folder: where `<part>.json` is written.
        ceilings: values of the part `ceilings` by name.
        values: what was measured.
        notes: what was left out, and fallbacks that were used.
        problems: what went wrong.
        seconds: wall time.
    """

    part: str
    device: str
    folder: Path
    ceilings: dict[str, float] = field(default_factory=dict)
    status: Status = "passed"
    values: list[Value] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def small(self) -> bool:
        """True on a CPU, where sizes are tiny."""
        return self.device == "cpu"

    def add(
        self,
        name: str,
        value: float,
        unit: str = "",
        *,
        least: float | None = None,
        most: float | None = None,
        of: str | None = None,
    ) -> None:
        """Record a value; one outside its bounds is a problem. ``of`` names the ceiling that it is a share of."""
        ceiling = self.ceilings.get(of) if of else None
        self.values.append(Value(name, float(value), unit, least, most, ceiling))
        if not self.values[-1].passed:
            self.problems.append(self.values[-1].line())
        self.write()
        print(self.values[-1].line(), flush=True)

    def write(self) -> None:
        """Write `<part>.json`, so that a part which hangs or crashes keeps what it has measured."""
        if self.problems:
            self.status = "failed"
        (self.folder / f"{self.part}.json").write_text(json.dumps(self.as_json()) + "\n")

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {key: value for key, value in asdict(self).items() if key not in ("folder", "ceilings")}

    def read(self) -> None:
        """Take over what the part's own process has written."""
        path = self.folder / f"{self.part}.json"
        if path.exists():
            raw = json.loads(path.read_text())
            self.values, self.notes = [Value(**value) for value in raw["values"]], raw["notes"]
            self.problems, self.status = raw["problems"], raw["status"]

    def lines(self) -> list[str]:
        """Return the part's section of the report."""
        details = [f"problem: {problem}" for problem in self.problems]
        details += [value.line() for value in self.values if value.passed]
        details += [f"note: {note}" for note in self.notes]
        return ["", f"## {self.part}: {self.status}, {self.seconds:.0f} s", "", *(f"- {detail}" for detail in details)]
