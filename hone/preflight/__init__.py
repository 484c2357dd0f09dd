"""Checks before a run starts. They load no weights and report all problems at once.

A rule is a small function with a stable code (see :mod:`hone.preflight.rules`); ``docs/troubleshooting.md`` is the index of
codes. Every training command calls :func:`check`; :func:`examine` returns the same findings as a :class:`Report`.
"""

from __future__ import annotations

from hone.preflight import (
    agents,
    algorithm,
    asynchronous,
    batches,
    checkpoints,
    cluster,
    device,
    distillation,
    effectless,
    engines,
    environment,
    files,
    images,
    layouts,
    learning,
    lifecycle,
    megatron,
    methods,
    names,
    optimizers,
    preference,
    rewards,
    rows,
    speculative,
    template,
)
from hone.preflight.evidence import Evidence
from hone.preflight.plan.batch import batch_plan, training_rows
from hone.preflight.report import Report, check, examine
from hone.preflight.rules import RULES, Stage, findings

__all__ = [
    "RULES",
    "Evidence",
    "Report",
    "Stage",
    "agents",
    "algorithm",
    "asynchronous",
    "batch_plan",
    "batches",
    "check",
    "checkpoints",
    "cluster",
    "device",
    "distillation",
    "effectless",
    "engines",
    "environment",
    "examine",
    "files",
    "images",
    "findings",
    "layouts",
    "learning",
    "lifecycle",
    "megatron",
    "methods",
    "names",
    "optimizers",
    "preference",
    "rewards",
    "rows",
    "speculative",
    "template",
    "training_rows",
]
