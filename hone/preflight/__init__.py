"""Checks before a run starts. They load no weights and report all problems at once.

A rule is a small function with a stable code (see :mod:`hone.preflight.rules`); ``docs/troubleshooting.md`` is the index of
codes. Every training command calls :func:`check`; :func:`examine` returns the same findings as a :class:`Report`.
"""

from __future__ import annotations

from hone.preflight import (  # noqa: F401 - they register their rules
    agents,
    distillation,
    effectless,
    engines,
    environment,
    files,
    four_bits,
    layouts,
    lifecycle,
    methods,
    rows,
    template,
    training,
)
from hone.preflight.evidence import Evidence
from hone.preflight.plan.batch import batch_plan, training_rows
from hone.preflight.rules import RULES, Report, Stage, check, examine, findings

__all__ = ["RULES", "Evidence", "Report", "Stage", "batch_plan", "check", "examine", "findings", "training_rows"]
