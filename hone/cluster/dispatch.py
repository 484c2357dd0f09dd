"""How a call on a group of workers becomes a call on each: ``@dispatch`` on a role's method says it.

A role is a plain class. A method that is called through a group names how its first argument goes to the workers, and how
what they return becomes one value again:

    @dispatch(Split.ROWS)                    each data-parallel rank gets its rows; columns come back in the batch's order
    @dispatch(Split.ALL, Collect.FIRST)      every worker gets the same; the first one's answer counts
    @dispatch(Split.ZERO)                    only the first worker is called
    @dispatch(Split.RANKS, Collect.EACH)     every argument is a list with one entry a worker

Ranks that hold pieces of one model copy (tensor or sequence parallel) get the same rows, and one of them answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
Reduce = Callable[[list[Any]], Any]

_SPEC = "__hone_dispatch__"


class Split(Enum):
    """How arguments go to the workers."""

    ALL = "all"
    """The same arguments to every worker."""
    ROWS = "rows"
    """The first argument, a batch or a list, is split over the data-parallel ranks; the others go to every worker."""
    ZERO = "zero"
    """Only the first worker is called."""
    RANKS = "ranks"
    """Every argument is a list with one entry a worker."""


class Collect(Enum):
    """How the workers' answers become one."""

    CONCAT = "concat"
    """Batches and lists of the data-parallel ranks are put together in the order of the rows."""
    FIRST = "first"
    """The answer of the first worker."""
    EACH = "each"
    """A list with the answer of every worker."""
    KEPT = "kept"
    """The first worker's answer, a list of named tensors, stays out there; the caller gets a reference, to be handed to
    another call. None comes back as it is."""


@dataclass(frozen=True)
class Dispatch:
    """What ``@dispatch`` wrote on a method.

    Attributes:
        split: how arguments go out.
        collect: how answers come back; a function of the list of the data-parallel ranks' answers reduces them.
        objects: whether columns of Python objects (episodes, scores) go along; tensors and ``uid`` always do.
        equal: whether every rank must get as many rows as the others; rows are then repeated to fill up, and what comes of
            the repeated ones is dropped.
        background: whether a worker process runs the method in a thread and answers other calls meanwhile.
    """

    split: Split
    collect: Collect | Reduce
    objects: bool = False
    equal: bool = False
    background: bool = False


def dispatch(
    split: Split = Split.ROWS,
    collect: Collect | Reduce | None = None,
    *,
    objects: bool = False,
    equal: bool = False,
    background: bool = False,
) -> Callable[[Method], Method]:
    """Mark a method of a role as callable through its group. See :class:`Dispatch`.

    Args:
        collect: None means CONCAT for rows, EACH for an entry a worker, else FIRST.
    """
    usual = {Split.ROWS: Collect.CONCAT, Split.RANKS: Collect.EACH}
    spec = Dispatch(split, collect or usual.get(split, Collect.FIRST), objects, equal, background)

    def mark(method: Method) -> Method:
        setattr(method, _SPEC, spec)
        return method

    return mark


def dispatch_of(role: type, method: str) -> Dispatch:
    """What a method of a role says about itself.

    Raises:
        AttributeError: there is no such method, or it is not marked.
    """
    found = getattr(role, method, None)
    spec = getattr(found, _SPEC, None)
    if spec is None:
        marked = sorted(name for name in dir(role) if hasattr(getattr(role, name), _SPEC))
        reason = "is not marked with @dispatch" if found is not None else "does not exist"
        raise AttributeError(f"{role.__name__}.{method} {reason}; a group of it can be asked for: {', '.join(marked)}")
    return spec


@dataclass(frozen=True)
class RowGroups:
    """Rows of a batch in groups, such as the mini-batches of a step. When the batch is split, every rank gets of each group
    the rows that it has, by their numbers in its own part; so all ranks see the same number of groups.

    Attributes:
        groups: row numbers of each group.
    """

    groups: Sequence[Sequence[int]]

    def __iter__(self) -> Iterator[Sequence[int]]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True)
class Kept:
    """Named tensors that stay out there.

    Attributes:
        ref: a reference as the transport has it.
    """

    ref: Any


class Answer(ABC):
    """What a call on a group gives: await it, or wait for its ``result()``."""

    @abstractmethod
    def __await__(self) -> Any: ...

    @abstractmethod
    def result(self) -> Any:
        """Block until it is there."""

    def balance(self) -> dict[str, float]:
        """Metrics of how a batch was divided over data-parallel ranks; none where there is one."""
        return {}
