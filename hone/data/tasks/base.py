"""Interface of task makers: sources of problems drawn from a seed, and the parser of their options."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, get_type_hints, runtime_checkable

from hone.errors import ConfigError, did_you_mean
from hone.registry import Registry


@dataclass(frozen=True)
class Problem:
    """One problem with its answer."""

    question: str  # question of the user
    ground_truth: str  # value that the scorer of ``data_source`` compares with
    solution: str | None  # a worked answer, as an assistant would write it; None if the task has none
    extra: dict[str, Any] = field(default_factory=dict)  # further facts, stored in ``extra_info``
    prompt: list[dict[str, Any]] | None = None  # messages before the answer; None is the question as a user message
    # messages of a worked answer of several turns; None is ``solution`` as one assistant message
    answer: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None  # function schemas shown in prompt and answer, for supervised fine-tuning
    agent_name: str | None = None  # agent loop that plays the problem; None: the run's default
    key: str | None = None  # identity of the problem; None: the question
    images: tuple[bytes, ...] = ()  # files of the images, one for each mark in the prompt


class Task(Protocol):
    """A source of problems."""

    @property
    def data_source(self) -> str:
        """Return the kind of problem, which selects the scorer."""
        ...

    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield problems drawn from ``seed``, always the same ones in the same order; repeats may occur."""
        ...


@runtime_checkable
class TaskWithFiles(Protocol):
    """A task whose problems need additional files next to the dataset."""

    def files(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of each file by name (``*.jsonl``)."""
        ...


TASKS: Registry[Callable[[Sequence[str]], Task]] = Registry("task")
"""Functions from ``key=value`` options to a task, by name."""

T = TypeVar("T")


def parse_options(kind: type[T], options: Sequence[str], *, task: str) -> T:
    """Build a dataclass of options from ``key=value`` words.

    Raises ConfigError: a word without "=", an unknown key, a key given twice, or a value of the wrong type.
    """
    types = get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(f"'{option}' is not key=value", where=task, fix=f"options: {', '.join(names)}")
        if name not in names:
            raise ConfigError(f"unknown option '{name}'", where=task, fix=did_you_mean(name, names))
        if name in values:
            raise ConfigError(f"option '{name}' is given twice", where=task, fix="give it once")
        try:
            values[name] = types[name](text)
        except ValueError:
            raise ConfigError(
                f"{name}={text} is not {'a whole number' if types[name] is int else 'a number'}",
                where=task,
                fix=f"{name}={getattr(kind, name)}",
            ) from None
    return kind(**values)


def task(name: str, options: type[T]) -> Callable[[Callable[[T], Task]], Callable[[T], Task]]:
    """Return a decorator that registers a class of tasks, which are made from parsed options of this type."""

    def decorate(make: Callable[[T], Task]) -> Callable[[T], Task]:
        TASKS.register(name)(lambda words: make(parse_options(options, words, task=name)))
        return make

    return decorate


def json_options(words: Sequence[str], *, task: str, example: str) -> dict[str, Any]:
    """Return ``key=value`` words as a mapping; values are read as JSON where they are JSON.

    Raises ConfigError: a word without "="; the fix is the example.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"'{word}' is not key=value", where=task, fix=example)
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def require(task: str, condition: bool, what: str, fix: str) -> None:
    if not condition:
        raise ConfigError(what, where=task, fix=fix)


def wording(phrasings: int, fact: str) -> dict[str, int]:
    """Return ``{"phrasing": index}`` for a problem worded in one of several ways, and nothing for a problem with one wording.

    The fact decides, not the generator of the problems: a task draws the same problems whatever its number of phrasings.
    """
    return {"phrasing": random.Random(fact).randrange(phrasings)} if phrasings > 1 else {}
