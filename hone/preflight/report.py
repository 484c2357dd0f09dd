"""All findings of one check, those that stop the run first."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hone.config.problems import raise_together
from hone.config.reads import UNREAD
from hone.config.trees import AnyConfig
from hone.errors import ConfigError, Finding, did_you_mean
from hone.preflight.evidence import Evidence
from hone.preflight.rules import RULES, Stage, findings

log = logging.getLogger("hone.preflight")


@dataclass(frozen=True)
class Report:
    """What the rules found.

    Attributes:
        findings: errors first, then warnings; within each in the order of the stages.
        silenced: how many findings of each code ``preflight.allow`` let pass.
    """

    findings: list[Finding]
    silenced: Counter[str] = field(default_factory=Counter)

    @property
    def errors(self) -> list[Finding]:
        """The findings that stop the run."""
        return [found for found in self.findings if found.stops]

    @property
    def warnings(self) -> list[Finding]:
        """The findings that the run continues with."""
        return [found for found in self.findings if not found.stops]

    @property
    def stops(self) -> bool:
        """Whether the run may not start."""
        return bool(self.errors)

    def render(self) -> str:
        """Return every message in the house form, each with its severity, and what was silenced."""
        lines = [f"{found.severity} {found.error.render()}" for found in self.findings]
        return "\n".join([*lines, *self._silenced_line()])

    def as_json(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return {"findings": [found.as_json() for found in self.findings], "silenced": dict(self.silenced)}

    def _silenced_line(self) -> list[str]:
        if not self.silenced:
            return []
        counts = ", ".join(f"{code} ({count})" for code, count in sorted(self.silenced.items()))
        return [f"let pass by preflight.allow: {counts}"]


def examine(config: AnyConfig, stages: tuple[Stage, ...] = tuple(Stage), evidence: Evidence | None = None) -> Report:
    """Run all rules of these stages and collect what they find; nothing is raised, no weights are loaded."""
    allowed = set(config.preflight.allow)
    codes = {entry.code for entry in RULES} | {UNREAD}
    kept = [
        Finding(
            ConfigError(
                f"no rule has the code '{code}'", where="preflight.allow", fix=did_you_mean(code, codes), code="R11"
            ),
            stops=True,
        )
        for code in sorted(allowed - codes)
    ]
    silenced: Counter[str] = Counter()
    seen = evidence or Evidence(config)
    with _rows_stay():
        for found in findings(config, stages, seen):
            if found.error.code in allowed:
                silenced[found.error.code] += 1
            else:
                kept.append(found)
    seen.close()
    return Report(sorted(kept, key=lambda found: not found.stops), silenced)


@contextlib.contextmanager
def _rows_stay() -> Iterator[None]:
    """Spare the search for reference cycles, which walks over all rows read so far, again and again while more are read."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check(config: AnyConfig) -> None:
    """Check a configuration and what it names before a run: warnings are logged, errors are raised together.

    Raises:
        HoneError: something that the run cannot start with; with several, one error holds all their messages.
    """
    report = examine(config)
    for found in report.warnings:
        log.warning("%s", found.error.render())
    for line in report._silenced_line():
        log.warning("%s", line)
    raise_together([found.error for found in report.errors])
