"""What a rule is: a small function that looks at a configuration and yields what it finds.

>>> @rule("R99", RLConfig)
... def no_thirteen(config):
...     if config.trainer.seed == 13:
...         yield warning("the seed is 13", why="some find it unlucky", fix="trainer.seed=14", where="trainer.seed")

Rules run in the order of their registration; importing a module of rules registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hone.config.trees import AnyConfig
from hone.errors import ConfigError, HoneError


@dataclass(frozen=True)
class Finding:
    """What a rule found; ``stops`` tells whether the run may not start."""

    error: HoneError
    stops: bool


Check = Callable[[Any], Iterable[Finding]]


@dataclass(frozen=True)
class Rule:
    """A check with its code and the trees it looks at."""

    code: str
    trees: tuple[type, ...]
    check: Check


RULES: list[Rule] = []


def rule(code: str, *trees: type) -> Callable[[Check], Check]:
    """Return a decorator that registers a check of ``trees`` under ``code``, which its findings bear."""

    def register(check: Check) -> Check:
        RULES.append(Rule(code, trees, check))
        return check

    return register


def error(what: str, *, why: str = "", fix: str = "", where: str = "") -> Finding:
    """A finding that stops the run."""
    return Finding(ConfigError(what, why=why, fix=fix, where=where), stops=True)


def warning(what: str, *, why: str = "", fix: str = "", where: str = "") -> Finding:
    """A finding that the run continues with."""
    return Finding(ConfigError(what, why=why, fix=fix, where=where), stops=False)


def findings(config: AnyConfig) -> Iterator[Finding]:
    """Run every rule for this tree; each finding bears the code of its rule."""
    for entry in RULES:
        if type(config) in entry.trees:
            for found in entry.check(config):
                e = found.error
                coded = type(e)(e.what, why=e.why, fix=e.fix, where=e.where, code=entry.code)
                yield Finding(coded, found.stops)
