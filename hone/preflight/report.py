"""The report of a check: all findings, errors first."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hone.config.check import raise_together
from hone.config.trees import AnyConfig
from hone.errors import ConfigError, Finding, did_you_mean
from hone.preflight.evidence import Evidence
from hone.preflight.rules import RULES, Stage, findings

log = logging.getLogger("hone.preflight")


@dataclass(frozen=True)
class Report:
    """Findings of the rules."""

    findings: list[Finding]  # errors, then warnings; each in the order of the stages
    # number of findings per code that ``preflight.allow`` silenced
    silenced: Counter[str] = field(default_factory=Counter)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.stops]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.stops]

    @property
    def stops(self) -> bool:
        return bool(self.errors)

    def render(self) -> str:
        """Return every message with its severity, and the silenced codes."""
        lines = [f"{finding.severity} {finding.error.render()}" for finding in self.findings]
        return "\n".join([*lines, *self._silenced_line()])

    def as_json(self) -> dict[str, Any]:
        return {"findings": [finding.as_json() for finding in self.findings], "silenced": dict(self.silenced)}

    def _silenced_line(self) -> list[str]:
        if not self.silenced:
            return []
        counts = ", ".join(f"{code} ({count})" for code, count in sorted(self.silenced.items()))
        return [f"silenced by preflight.allow: {counts}"]


def examine(config: AnyConfig, stages: tuple[Stage, ...] = tuple(Stage), evidence: Evidence | None = None) -> Report:
    """Run all rules of some stages and collect their findings; nothing is raised, no weights are loaded."""
    allowed = set(config.preflight.allow)
    codes = {entry.code for entry in RULES}
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
    with _without_garbage_collection():
        for finding in findings(config, stages, seen):
            if finding.error.code in allowed:
                silenced[finding.error.code] += 1
            else:
                kept.append(finding)
    seen.close()
    return Report(sorted(kept, key=lambda finding: not finding.stops), silenced)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn off the garbage collector, which would scan all rows again and again while more are read."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check(config: AnyConfig) -> None:
    """Check a configuration and its files before a run: log warnings, and raise all errors together. Raises HoneError:
    the run cannot start; one error holds the messages of all problems.
    """
    report = examine(config)
    for finding in report.warnings:
        log.warning("%s", finding.error.render())
    for line in report._silenced_line():
        log.warning("%s", line)
    raise_together([finding.error for finding in report.errors])
