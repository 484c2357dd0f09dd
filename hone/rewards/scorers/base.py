"""What a built-in scorer is, and how answers are found in responses."""

from __future__ import annotations

import fnmatch
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hone.errors import RewardError
from hone.registry import Registry

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
CONTEXT = ("services", "messages", "trajectory")
"""What a scorer is also given when its signature asks for it: what it may ask, the prompt, the whole episode. Such a scorer
does not run in a worker process."""


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Scorer:
    """A built-in scorer.

    Attributes:
        name: registered name.
        compute: ``f(data_source, solution_str, ground_truth, extra_info=None, **options) -> dict`` with ``score``.
        data_sources: names and shell patterns of the data sources it scores.
        options: names of its options.
        may_hang: it runs in a worker process with a time limit.
        package: package it needs, or None; and the extra of Hone that installs it.
        prepare: called once in a worker, before time is measured (slow imports).
        context: which of :data:`CONTEXT` it is given.
        check: called before the run with the services; raises RewardError where the scorer could not work.
    """

    name: str
    compute: Callable[..., Any]
    data_sources: tuple[str, ...]
    options: frozenset[str] = frozenset()
    may_hang: bool = False
    package: tuple[str, str] | None = None
    prepare: Callable[[], object] = field(default=_nothing)
    context: frozenset[str] = frozenset()
    check: Callable[[Any], object] | None = None

    @property
    def is_async(self) -> bool:
        """Whether it asks a service, and is awaited."""
        return inspect.iscoroutinefunction(self.compute)

    @property
    def reads_text_only(self) -> bool:
        """Whether it can be tried anywhere with the four arguments that every reward function has."""
        return not self.may_hang and not self.is_async and not self.context

    @property
    def needs_truth(self) -> bool:
        """Whether it compares with a ground truth: its parameter has no default."""
        return inspect.signature(self.compute).parameters["ground_truth"].default is inspect.Parameter.empty

    @property
    def text(self) -> str:
        """What it says of itself."""
        return inspect.cleandoc(self.compute.__doc__ or "")

    @property
    def summary(self) -> str:
        """The first sentence of it, in one line."""
        return " ".join(self.text.partition("\n\n")[0].split())

    def as_json(self) -> dict[str, Any]:
        """As plain data: names, options with their defaults, and where it runs."""
        parameters = inspect.signature(self.compute).parameters
        where = (
            "in worker processes"
            if self.may_hang
            else "together, as a service answers"
            if self.is_async
            else "in the trainer"
        )
        return {
            "name": self.name,
            "summary": self.summary,
            "data_sources": list(self.data_sources),
            "options": {name: parameters[name].default for name in parameters if name in self.options},
            "runs": where,
            "package": self.package[0] if self.package else None,
        }

    @property
    def file(self) -> str:
        """The file of its code."""
        return str(inspect.getsourcefile(self.compute))

    def is_installed(self) -> bool:
        """Whether the package it needs is there."""
        return self.package is None or importlib.util.find_spec(self.package[0]) is not None

    def check_installed(self) -> None:
        """Raise RewardError if the package it needs is missing."""
        if self.package is not None and not self.is_installed():
            raise RewardError(
                f"scorer '{self.name}' needs the package {self.package[0].replace('_', '-')}, which is not installed",
                fix=f"pip install 'hone-rl[{self.package[1]}]'",
            )


SCORERS: Registry[Scorer] = Registry("scorer", key="reward.scorer")


def register_scorer(
    name: str,
    *data_sources: str,
    may_hang: bool = False,
    package: tuple[str, str] | None = None,
    prepare: Callable[[], object] = _nothing,
    check: Callable[[Any], object] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as scorer ``name`` of ``data_sources``."""

    def decorate(compute: Callable[..., Any]) -> Callable[..., Any]:
        names = frozenset(inspect.signature(compute).parameters)
        options, context = names - {*ARGUMENTS, *CONTEXT}, names & set(CONTEXT)
        SCORERS.register(name)(Scorer(name, compute, data_sources, options, may_hang, package, prepare, context, check))
        return compute

    return decorate


def scorer_for(data_source: str) -> Scorer | None:
    """The scorer of a data source: by exact name first, then by pattern, or None."""
    scorers = [SCORERS.get(name) for name in SCORERS]
    for scorer in scorers:
        if data_source in scorer.data_sources:
            return scorer
    for scorer in scorers:
        if any(fnmatch.fnmatchcase(data_source, pattern) for pattern in scorer.data_sources):
            return scorer
    return None


def tagged_answer(text: str, tag: str = "answer") -> str | None:
    """The text of the last ``<answer>...</answer>``, or None."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def final_answer(text: str) -> tuple[str, bool]:
    """The answer in a response, and whether it was marked as such.

    It stands in the last ``<answer>...</answer>``, else after the last ``####``, else it is the whole response.
    """
    tagged = tagged_answer(text)
    if tagged is not None:
        return tagged, True
    _, mark, rest = text.rpartition("####")
    if mark:
        return rest.strip().partition("\n")[0].strip(), True
    return text.strip(), False
