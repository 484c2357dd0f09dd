"""The result of a translation: lines with their outcomes, values and remarks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.apps.verl.launch import Trouble
from hone.config.keys import documentation
from hone.config.migration import Outcome, Reading
from hone.config.trees import TREES


@dataclass(frozen=True)
class Line:
    """A setting with its line number and its outcome."""

    number: int
    text: str
    reading: Reading


@dataclass(frozen=True)
class Addition:
    """A value that the translation needs and no line sets."""

    key: str
    value: Any
    why: str


@dataclass
class Translation:
    """A translated run of verl or LLaMA-Factory."""

    command: str = "train"  # command of the configuration: train or sft
    lines: list[Line] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # key to value, in Hone's tree
    additions: list[Addition] = field(default_factory=list)  # values that no line sets
    not_understood: list[Trouble] = field(default_factory=list)  # lines that could not be translated
    remarks: list[Trouble] = field(default_factory=list)
    # names of variables that the launch sets for itself; they are not part of a configuration
    environment: tuple[str, ...] = ()

    def leave_out(self, key: str, why: str) -> None:
        """Remove a value without effect and its entries, and mark the lines that set it."""
        gone = {path for path in self.values if path == key or path.startswith(f"{key}.")}
        self.values = {path: value for path, value in self.values.items() if path not in gone}
        self.additions = [addition for addition in self.additions if addition.key not in gone]
        for at, line in enumerate(self.lines):
            if gone & line.reading.sets.keys():
                reported = Reading(line.reading.key, line.reading.value, Outcome.WITHOUT_EFFECT, says=why)
                self.lines[at] = Line(line.number, line.text, reported)

    def add(self, key: str, value: Any, why: str) -> None:
        self.values[key] = value
        self.additions.append(Addition(key, value, why))

    def tree(self) -> dict[str, Any]:
        """Return the values as nested mappings, in the order of the tree."""
        order = {key.path: at for at, key in enumerate(documentation(TREES[self.command]))}
        nested: dict[str, Any] = {}
        for path in sorted(self.values, key=lambda path: order.get(path, len(order))):
            *blocks, last = path.split(".")
            inner = nested
            for block in blocks:
                inner = inner.setdefault(block, {})
            inner[last] = self.values[path]
        return nested
