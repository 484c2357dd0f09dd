"""Calls on groups of workers: ``@dispatch`` on a role's method says how one call becomes a call on each worker.

A role is a plain class. A method that is called through a group declares how its first argument is split over the workers, and
how their results are combined:

        @dispatch(Split.ROWS)                    each data-parallel rank gets its rows; columns return in the batch's order
        @dispatch(Split.ALL, Collect.FIRST)      every worker gets the same; the first one's result is returned
        @dispatch(Split.ZERO)                    only the first worker is called
        @dispatch(Split.ONE)                     only the worker with the number in the first argument is called
        @dispatch(Split.RANKS, Collect.EACH)     every argument is a list with one entry per worker

    Ranks that share one model copy (tensor or sequence parallel) get the same rows, and one of them answers.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
ResultT = TypeVar("ResultT", covariant=True)
Reduce = Callable[[list[Any]], Any]

_SPEC = "__hone_dispatch__"


class Split(Enum):
    """Distribution of the arguments to the workers."""

    ALL = "all"
    """The same arguments to every worker."""
    ROWS = "rows"
    """The first argument, a batch or a list, is split over the data-parallel ranks; the others go to every worker."""
    ZERO = "zero"
    """Only the first worker is called."""
    ONE = "one"
    """Only the worker whose number is the first argument is called; it gets the other arguments."""
    RANKS = "ranks"
    """Every argument is a list with one entry per worker."""


class Collect(Enum):
    """Combination of the workers' results."""

    CONCAT = "concat"
    """Concatenate batches and lists of the data-parallel ranks in the order of the rows."""
    FIRST = "first"
    """Return the result of the first worker."""
    EACH = "each"
    """Return a list with the result of every worker."""
    REMOTE = "remote"
    """Keep the first worker's result, a list of named tensors, in the object store (host memory), and return a reference for another
    call. None is returned unchanged; the local runtime has no store and returns the list itself."""


@dataclass(frozen=True)
class Dispatch:
    """Declaration of ``@dispatch`` on a method.

    Attributes:
        split: distribution of the arguments.
        collect: combination of the results; a function reduces the list of the data-parallel ranks' results.
        objects: whether columns of Python objects (episodes, scores) are sent too; tensors, images and ``uid`` always are.
        equal: whether every rank must get the same number of rows; rows are then repeated to fill up, and results of the
            repeated ones are dropped.
        background: whether a worker process runs the method in a thread and answers other calls meanwhile.
        lenders: whether processes that only lend their device to another are called too (:class:`RoleSpec.group`).
    """

    split: Split
    collect: Collect | Reduce
    objects: bool = False
    equal: bool = False
    background: bool = False
    lenders: bool = False


def dispatch(
    split: Split = Split.ROWS,
    collect: Collect | Reduce | None = None,
    *,
    objects: bool = False,
    equal: bool = False,
    background: bool = False,
    lenders: bool = False,
) -> Callable[[Method], Method]:
    """Mark a method of a role as callable through its group. See :class:`Dispatch`.

    Args:
        collect: None means CONCAT for rows, EACH for one entry per worker, else FIRST.
    """
    usual = {Split.ROWS: Collect.CONCAT, Split.RANKS: Collect.EACH}
    spec = Dispatch(split, collect or usual.get(split, Collect.FIRST), objects, equal, background, lenders)

    def mark(method: Method) -> Method:
        setattr(method, _SPEC, spec)
        return method

    return mark


@functools.cache
def dispatched(role: type) -> Mapping[str, Dispatch]:
    """Return the declarations of a role's methods, by name."""
    marked = {name: getattr(getattr(role, name), _SPEC, None) for name in dir(role)}
    return {name: spec for name, spec in marked.items() if spec is not None}


def offer_methods(group: Any, role: type, ask: Callable[..., Any]) -> None:
    """Give a group a method for each of its role's: ``ask(spec, name, ...)``, or an error for one without ``@dispatch``."""
    marked = dispatched(role)

    def refuse(name: str, *_: Any, **__: Any) -> None:
        names = ", ".join(sorted(marked))
        raise AttributeError(f"{role.__name__}.{name} is not marked with @dispatch; a group has the methods {names}")

    for name in dir(role):
        if name in marked:
            setattr(group, name, functools.partial(ask, marked[name], name))
        elif not name.startswith("_") and callable(getattr(role, name)) and not hasattr(group, name):
            setattr(group, name, functools.partial(refuse, name))


@dataclass(frozen=True)
class RowGroups:
    """Rows of a batch in groups, such as the mini-batches of a step.

    When the batch is split, every rank gets its rows of each group, numbered within its part. All ranks therefore have
    the same number of groups.

    Attributes:
        groups: row numbers of each group.
    """

    groups: Sequence[Sequence[int]]

    def __iter__(self) -> Iterator[Sequence[int]]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True)
class RemoteTensors:
    """Named tensors in the object store.

    Attributes:
        ref: reference of the transport.
    """

    ref: Any


class Answer(ABC, Generic[ResultT]):
    """Pending result of a call on a group: await it, or call its blocking ``result()``."""

    @abstractmethod
    def __await__(self) -> Generator[Any, None, ResultT]: ...

    @abstractmethod
    def result(self) -> ResultT:
        """Block until the result is available."""

    def balance(self) -> dict[str, float]:
        """Return metrics of the division over data-parallel ranks; empty with one rank."""
        return {}
