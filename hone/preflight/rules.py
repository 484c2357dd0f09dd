"""What a rule is: a small function that looks at a configuration and yields what it finds.

>>> @rule("R99", RLConfig)
... def no_thirteen(config):
...     if config.trainer.seed == 13:
...         yield warning("the seed is 13", why="some find it unlucky", fix="trainer.seed=14", where="trainer.seed")

A rule that looks at more than keys takes a second argument, the :class:`~hone.preflight.evidence.Evidence`: rows, tokenizer,
machine, each read once for all rules. Rules run stage by stage, within a stage in the order of their registration; importing
a module of rules registers them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from hone.config.trees import AnyConfig
from hone.errors import ConfigError, Finding
from hone.preflight.evidence import Evidence

__all__ = ["RULES", "Check", "Finding", "Rule", "Stage", "error", "findings", "rule", "warning"]


class Stage(IntEnum):
    """When a rule looks, and at what."""

    ARITHMETIC = 1
    """Keys, and how they go together."""
    FILES = 2
    """Directories, dataset files, their columns and rows."""
    TEMPLATE = 3
    """What the tokenizer makes of the rows."""
    REWARD = 4
    """The reward, tried on a few rows."""
    ENVIRONMENT = 5
    """The machine."""


Check = Callable[..., Iterable[Finding]]


@dataclass(frozen=True)
class Rule:
    """A check with its code, the trees it looks at and its stage."""

    code: str
    trees: tuple[type, ...]
    check: Check
    stage: Stage

    def run(self, config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
        """Yield what the check finds, under the code of the rule."""
        arguments = (config, evidence)[: len(inspect.signature(self.check).parameters)]
        for found in self.check(*arguments):
            e = found.error
            yield Finding(type(e)(e.what, why=e.why, fix=e.fix, where=e.where, code=self.code), found.stops)


RULES: list[Rule] = []


def rule(code: str, *trees: type, stage: Stage = Stage.ARITHMETIC) -> Callable[[Check], Check]:
    """Return a decorator that registers a check of ``trees`` under ``code``, which its findings bear."""

    def register(check: Check) -> Check:
        RULES.append(Rule(code, trees, check, stage))
        return check

    return register


def error(what: str, *, why: str = "", fix: str = "", where: str = "") -> Finding:
    """A finding that stops the run."""
    return Finding(ConfigError(what, why=why, fix=fix, where=where), stops=True)


def warning(what: str, *, why: str = "", fix: str = "", where: str = "") -> Finding:
    """A finding that the run continues with."""
    return Finding(ConfigError(what, why=why, fix=fix, where=where), stops=False)


def findings(
    config: AnyConfig, stages: Iterable[Stage] = tuple(Stage), evidence: Evidence | None = None
) -> Iterator[Finding]:
    """Run every rule of these stages for this tree; each finding bears the code of its rule."""
    seen = evidence or Evidence(config)
    for stage in sorted(stages):
        for entry in RULES:
            if entry.stage == stage and type(config) in entry.trees:
                yield from entry.run(config, seen)
