"""Built-in scorers, and extraction of answers from responses."""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hone.data.answers import last_answer
from hone.errors import RewardError
from hone.extras import install_command
from hone.registry import Registry

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
CONTEXT = ("services", "messages", "trajectory")
"""Additional arguments that a scorer's signature may request: services, the prompt's messages, the trajectory. A scorer with one
of them does not run in a worker process."""


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Scorer:
    """Built-in scorer."""

    name: str  # registered name
    # ``f(data_source, solution_str, ground_truth, extra_info=None, **options) -> dict`` with ``score``
    compute: Callable[..., Any]
    data_sources: tuple[str, ...]  # names and shell patterns of the data sources that it scores
    options: frozenset[str] = frozenset()  # names of its options
    may_hang: bool = False  # True to run the scorer in a worker process with a time limit
    package: tuple[str, str] | None = None  # required package and the extra of Hone that installs it, or None
    # called once in a worker, before time is measured (slow imports)
    prepare: Callable[[], object] = field(default=_nothing)
    context: frozenset[str] = frozenset()  # arguments of :data:`CONTEXT` that it receives
    # called before the run with the services; raises RewardError if the scorer cannot work
    check: Callable[[Any], object] | None = None

    @property
    def is_async(self) -> bool:
        """True if the scorer uses a service and is awaited."""
        return inspect.iscoroutinefunction(inspect.unwrap(self.compute))

    @property
    def reads_text_only(self) -> bool:
        """True if the scorer runs in this process with only the four standard arguments."""
        return not self.may_hang and not self.is_async and not self.context

    @property
    def needs_truth(self) -> bool:
        """True if the scorer needs a ground truth: the parameter has no default."""
        return inspect.signature(self.compute).parameters["ground_truth"].default is inspect.Parameter.empty

    @property
    def text(self) -> str:
        return inspect.cleandoc(self.compute.__doc__ or "")

    @property
    def summary(self) -> str:
        return " ".join(self.text.partition("\n\n")[0].split())

    def as_json(self) -> dict[str, Any]:
        """Return plain data: names, options with defaults, and where the scorer runs."""
        parameters = inspect.signature(self.compute).parameters
        where = (
            "in worker processes"
            if self.may_hang
            else "concurrently, in the trainer's event loop"
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
        return str(inspect.getsourcefile(inspect.unwrap(self.compute)))

    def is_installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package[0]) is not None

    def check_installed(self) -> None:
        """Raise RewardError if the required package is missing."""
        if self.package is not None and not self.is_installed():
            raise RewardError(
                f"scorer '{self.name}' needs the package {self.package[0].replace('_', '-')}, which is not installed",
                fix=install_command(self.package[1]),
            )


class Scorers(Registry[Scorer]):
    """Scorers by name, or by the exact name of a data source that they score: ``exact`` is ``exact_match`` too."""

    def get(self, name: str, *, key: str | None = None) -> Scorer:
        return self._of_source(name) or super().get(name, key=key)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self._of_source(name) is not None

    def _of_source(self, name: object) -> Scorer | None:
        if super().__contains__(name):
            return None
        return next((scorer for scorer in self._entries.values() if name in scorer.data_sources), None)


SCORERS = Scorers("scorer", key="reward.scorer")


def register_scorer(
    name: str,
    *data_sources: str,
    may_hang: bool = False,
    package: tuple[str, str] | None = None,
    prepare: Callable[[], object] = _nothing,
    check: Callable[[Any], object] | None = None,
    whole_text: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as scorer ``name`` of ``data_sources``.

    The scorer receives the last turn without thoughts and tool calls as ``solution_str``; with ``whole_text`` all that the policy wrote.
    """

    def decorate(compute: Callable[..., Any]) -> Callable[..., Any]:
        names = frozenset(inspect.signature(compute).parameters)
        compute = compute if whole_text else _of_last_answer(compute)
        options, context = names - {*ARGUMENTS, *CONTEXT}, names & set(CONTEXT)
        SCORERS.register(name)(Scorer(name, compute, data_sources, options, may_hang, package, prepare, context, check))
        return compute

    return decorate


def graded(score: float, *, right: bool, marked: bool, pred: Any) -> dict[str, Any]:
    """Return a scorer's result: the score, whether the answer is right and in the expected place, and the answer."""
    return {"score": float(score), "acc": float(right), "format": float(marked), "pred": pred}


def _of_last_answer(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scorer that reads the last answer of the text that it receives."""

    @functools.wraps(compute)
    def on_answer(data_source: str, solution_str: str, *rest: Any, **named: Any) -> Any:
        extra_info = rest[1] if len(rest) > 1 else named.get("extra_info")
        return compute(data_source, last_answer(solution_str, extra_info), *rest, **named)

    return on_answer


def scorer_for(data_source: str) -> Scorer | None:
    """Return the scorer of a data source, by exact name first, then by pattern; None without one."""
    scorers = [SCORERS.get(name) for name in SCORERS]
    for scorer in scorers:
        if data_source in scorer.data_sources:
            return scorer
    for scorer in scorers:
        if any(fnmatch.fnmatchcase(data_source, pattern) for pattern in scorer.data_sources):
            return scorer
    return None
