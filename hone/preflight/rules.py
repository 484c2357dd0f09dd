"""Rules: small functions that check a configuration and yield findings; reports of them, and the index of their codes.

>>> @rule("R99")
... def no_thirteen(config: RLConfig) -> Findings:
...     if config.trainer.seed == 13:
...         yield warning("the seed is 13", why="some find it unlucky", fix="trainer.seed=14", where="trainer.seed")

A rule applies to the trees that its first parameter is annotated with. One that needs more than keys takes a second argument,
the :class:`~hone.preflight.evidence.Evidence`: rows, tokenizer, machine, each read once for all rules. A HoneError that it
raises is a finding too, so a rule may call what a constructor calls later. Rules run stage by stage, and within a stage in the
order of their registration. Importing a module of rules registers them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import re
import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

from hone.config.keys import raise_together
from hone.config.trees import TREES, AnyConfig
from hone.errors import ConfigError, Finding, HoneError, UnknownMethod, did_you_mean
from hone.preflight.evidence import Evidence
from hone.text import replace_between

__all__ = ["RULES", "Finding", "Findings", "Rule", "Stage", "error", "error_of", "findings", "rule", "warning"]

log = logging.getLogger("hone.preflight")

Findings = Iterator[Finding]


class Stage(IntEnum):
    """Stage of a rule, by the data that it reads."""

    ARITHMETIC = 1  # keys and their combinations
    FILES = 2  # directories, dataset files, their columns and rows
    TEMPLATE = 3  # rows as the tokenizer renders them
    REWARD = 4  # the reward, tried on a few rows
    ENVIRONMENT = 5  # the machine


Check = Callable[..., Iterable[Finding] | None]
Registered = TypeVar("Registered", bound=Check)


@dataclass(frozen=True)
class Rule:
    """A check with its code, the configuration trees it applies to, and its stage."""

    code: str
    trees: tuple[type, ...]
    check: Check
    stage: Stage

    def run(self, config: AnyConfig, evidence: Evidence) -> Findings:
        """Yield the findings of the check, and the error that it raises, with the code of the rule."""
        arguments = (config, evidence)[: len(inspect.signature(self.check).parameters)]
        try:
            for finding in self.check(*arguments) or ():
                yield with_code(finding.error, self.code, stops=finding.stops)
        except UnknownMethod:
            raise
        except HoneError as problem:
            yield with_code(problem, self.code)


RULES: list[Rule] = []


def rule(code: str, stage: Stage = Stage.ARITHMETIC) -> Callable[[Registered], Registered]:
    """Return a decorator that registers a check under ``code``, the code of its findings."""

    def register(check: Registered) -> Registered:
        tree = next(iter(inspect.signature(check, eval_str=True).parameters.values())).annotation
        RULES.append(Rule(code, typing.get_args(tree) or (tree,), check, stage))
        return check

    return register


def error(what: str, *, why: str = "", fix: str = "", where: str = "", stops: bool = True) -> Finding:
    """Return a finding that stops the run; ``where`` is by default the key with which ``fix`` begins."""
    key = re.match(r"([\w.]+)=", fix)
    return Finding(ConfigError(what, why=why, fix=fix, where=where or (key[1] if key else "")), stops)


warning = functools.partial(error, stops=False)


def error_of(check: Callable[..., object], *arguments: Any) -> Findings:
    """Yield the error that a check raises, if it does, for a rule that continues."""
    try:
        check(*arguments)
    except HoneError as problem:
        yield Finding(problem, stops=True)


def with_code(e: HoneError, code: str, *, stops: bool = True) -> Finding:
    return Finding(type(e)(e.what, why=e.why, fix=e.fix, where=e.where, code=code), stops)


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


# reports -----------------------------------------------------------------------------------------------------------------


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
    allowed, codes = set(config.preflight.allow), {entry.code for entry in RULES}
    kept = [
        with_code(
            ConfigError(f"no rule has the code '{code}'", where="preflight.allow", fix=did_you_mean(code, codes)), "R11"
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
    for line in [*(finding.error.render() for finding in report.warnings), *report._silenced_line()]:
        log.warning("%s", line)
    raise_together([finding.error for finding in report.errors])


# the index of codes ------------------------------------------------------------------------------------------------------

ELSEWHERE = {
    "R09": ("loading", "Every key exists."),
    "R10": ("tests", "Every key of the tree has code that reads it."),
    "R16": ("start", "Each start prints the batch plan: prompts, sequences, mini-batches, updates, tokens and steps."),
    "R20": ("pilot", "Few groups have answers that are all correct or all wrong (`hone train --pilot`)."),
    "R28": ("always", "Sequences are packed, which sequence parallelism needs; there is no padded path."),
    "R37": (
        "pilot",
        "Few tool results are truncated, and few calls exceed the limit (`hone train --pilot`; in a run tool/truncated_rate and "
        "tool/over_limit_rate count them).",
    ),
    "R58": (
        "resume",
        "A run resumed at the end of an epoch continues with the next one; the checkpoint stores the position.",
    ),
    "R59": ("first step", "The engine's log-probs agree with the trainer's after a weight sync."),
    "R64": ("pilot", "Responses end before the limit (`hone train --pilot`)."),
}
"""Codes checked at another time than before the run (some also before it): when, and what is checked."""


@dataclass(frozen=True)
class CodeEntry:
    """A line of the index."""

    code: str
    when: str
    question: str
    trees: tuple[str, ...] = ()


def index() -> list[CodeEntry]:
    """Return all codes in order; a code of several rules has one entry per rule."""
    names = {tree: name for name, tree in TREES.items()}
    entries: dict[str, list[CodeEntry]] = defaultdict(list)
    for entry in RULES:
        question = " ".join((entry.check.__doc__ or "").split())
        trees = tuple(names[tree] for tree in entry.trees)
        entries[entry.code].append(CodeEntry(entry.code, entry.stage.name.lower(), question, trees))
    for code, (when, question) in ELSEWHERE.items():
        entries[code].append(CodeEntry(code, when, question))
    return [entry for code in sorted(entries) for entry in entries[code]]


BEGIN = "<!-- Generated from the rules by scripts/make_docs: do not edit from here -->"
END = "<!-- to here -->"


def index_page(existing: str) -> str:
    """Return the page with a new index of codes between the markers; the rest is unchanged.

    Raises ValueError: the page does not have each marker exactly once.
    """
    lines = ["| Code | When | Check |", "|---|---|---|"]
    lines += [f"| {entry.code} | {entry.when} | {_in_table(entry)} |" for entry in index()]
    return replace_between(existing, BEGIN, END, "\n".join(lines))


def _in_table(entry: CodeEntry) -> str:
    every = set(TREES) == set(entry.trees)
    names = (
        "" if every or not entry.trees or entry.trees == ("train",) else f" (`hone {'`, `hone '.join(entry.trees)}`)"
    )
    return entry.question.replace("|", "\\|") + names
