"""Rules: small functions that check a configuration and yield findings.

>>> @rule("R99", RLConfig)
... def no_thirteen(config):
...     if config.trainer.seed == 13:
...         yield warning("the seed is 13", why="some find it unlucky", fix="trainer.seed=14", where="trainer.seed")

A rule that needs more than keys takes a second argument, the :class:`~hone.preflight.evidence.Evidence`: rows, tokenizer,
machine, each read once for all rules. Rules run stage by stage, and within a stage in the order of their registration.
Importing a module of rules registers them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from hone.config.trees import AnyConfig
from hone.errors import ConfigError, Finding, UnknownMethod
from hone.preflight.evidence import Evidence

__all__ = ["RULES", "Check", "Finding", "Rule", "Stage", "error", "findings", "rule", "warning"]


class Stage(IntEnum):
    """Stage of a rule, by the data that it reads."""

    ARITHMETIC = 1  # keys and their combinations
    FILES = 2  # directories, dataset files, their columns and rows
    TEMPLATE = 3  # rows as the tokenizer renders them
    REWARD = 4  # the reward, tried on a few rows
    ENVIRONMENT = 5  # the machine


Check = Callable[..., Iterable[Finding]]


@dataclass(frozen=True)
class Rule:
    """A check with its code, the configuration trees it applies to, and its stage."""

    code: str
    trees: tuple[type, ...]
    check: Check
    stage: Stage

    def run(self, config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
        """Yield the findings of the check, with the code of the rule."""
        arguments = (config, evidence)[: len(inspect.signature(self.check).parameters)]
        for finding in self.check(*arguments):
            e = finding.error
            yield Finding(type(e)(e.what, why=e.why, fix=e.fix, where=e.where, code=self.code), finding.stops)


RULES: list[Rule] = []


def rule(code: str, *trees: type, stage: Stage = Stage.ARITHMETIC) -> Callable[[Check], Check]:
    """Return a decorator that registers a check of ``trees`` under ``code``, the code of its findings."""

    def register(check: Check) -> Check:
        RULES.append(Rule(code, trees, check, stage))
        return check

    return register


def error(what: str, *, why: str = "", fix: str = "", where: str = "") -> Finding:
    return Finding(ConfigError(what, why=why, fix=fix, where=where), stops=True)


def warning(what: str, *, why: str = "", fix: str = "", where: str = "") -> Finding:
    return Finding(ConfigError(what, why=why, fix=fix, where=where), stops=False)


def findings(
    config: AnyConfig, stages: Iterable[Stage] = tuple(Stage), evidence: Evidence | None = None
) -> Iterator[Finding]:
    """Run every rule of some stages for a configuration; each finding has the code of its rule.

    A rule that needs an unknown method is skipped, and R11 reports the name. If no rule reports it, the error itself is the
    last finding.
    """
    seen, stopped, unknown = evidence or Evidence(config), False, None
    for stage in sorted(stages):
        for entry in RULES:
            if entry.stage == stage and type(config) in entry.trees:
                try:
                    for finding in entry.run(config, seen):
                        stopped |= finding.stops
                        yield finding
                except UnknownMethod as missing:
                    unknown = unknown or missing
    if unknown is not None and not stopped:
        yield Finding(unknown, stops=True)
