"""Common prefixes of rows, at any depth: the tree that the tokens of a batch form, as an order of its rows.

In depth-first order a row shares its longest prefix with the row before it. So one number a row describes the whole tree:

    tokens             shared
    a b c d e f        0
    a b c d x          4        a fork of the first row
    a b y z            2        a fork of both, nearer to the root
    q r                0        another tree

Each row adds ``tokens - shared`` tokens to those of the rows before it.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hone.data.ragged import Ragged

Index = NDArray[np.int64]
_WIDTH = 8  # bytes of a token id


@dataclass(frozen=True)
class PrefixOrder:
    """``B`` rows in depth-first order of the tree of their prefixes.

    >>> rows = Ragged.from_rows([[1, 2, 3], [7], [1, 2, 3, 4], [1, 5]])
    >>> tree = PrefixOrder.from_tokens(rows)
    >>> tree.order.tolist(), tree.shared.tolist()
    ([2, 0, 3, 1], [0, 3, 1, 0])
    """

    order: Index  # ``[B]`` row at each place
    shared: Index  # ``[B]`` tokens that the row at each place shares with the row at the place before, 0 at the first

    @classmethod
    def from_tokens(cls, *columns: Ragged) -> PrefixOrder:
        """Compare the tokens of the rows; several columns are one sequence, as prompt and response are.

        Branches with the longest rows come first, and among equal lengths the branch with the first row.
        """
        rows = _big_endian(columns)
        return cls(*_depth_first(rows))

    @classmethod
    def from_groups(cls, groups: Sequence[Hashable], shared: Tensor) -> PrefixOrder:
        """Describe rows that share nothing but the first tokens of their group. ``shared``: ``[B]`` tokens of each row
        that the rows of its group have in common, such as its prompt.
        """
        numbers: dict[Hashable, int] = {}
        number = np.asarray([numbers.setdefault(group, len(numbers)) for group in groups], np.int64)
        order = np.argsort(number, kind="stable")
        sizes, number = shared.numpy()[order], number[order]
        common = np.zeros(len(order), np.int64)
        common[1:] = np.where(number[1:] == number[:-1], np.minimum(sizes[1:], sizes[:-1]), 0)
        return cls(order, common)

    def __len__(self) -> int:
        return len(self.order)

    @functools.cached_property
    def place(self) -> Index:
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(self.order))
        return place

    def between(self, left: Index, right: Index) -> Index:
        """Return how many tokens the rows at places ``left`` and at later places ``right`` share."""
        level = np.frexp(right - left)[1].astype(np.int64) - 1  # floor of the binary logarithm
        return np.minimum(self._minima[level, left + 1], self._minima[level, right + 1 - (1 << level)])

    def take(self, rows: Index) -> PrefixOrder:
        """Return the order of some rows; row ``i`` of the result is ``rows[i]``."""
        place = self.place[rows]
        order = np.argsort(place, kind="stable")
        shared = np.zeros(len(rows), np.int64)
        if len(rows) > 1:
            shared[1:] = self.between(place[order[:-1]], place[order[1:]])
        return PrefixOrder(order, shared)

    @functools.cached_property
    def _minima(self) -> Index:
        """Minima of ``shared`` over ranges: entry ``[k, i]`` is that over ``2**k`` places from ``i`` on."""
        rows, count = [self.shared], len(self.shared)
        while (width := 1 << len(rows)) <= count:
            last, half = rows[-1], width // 2
            minima = last.copy()
            minima[: count - half] = np.minimum(last[: count - half], last[half:])
            rows.append(minima)
        return np.stack(rows)


class PrefixSet:
    """A growing set of rows, and the tokens that each addition needs."""

    def __init__(self, tree: PrefixOrder, tokens: Sequence[int]) -> None:
        self._tree, self._tokens = tree, tokens
        self._places: list[int] = []

    def add(self, row: int) -> int:
        """Add a row; return how many of its tokens no row of the set had."""
        place = int(self._tree.place[row])
        at = bisect.bisect_left(self._places, place)
        neighbours = [(self._places[at - 1], place)] if at else []
        if at < len(self._places):
            neighbours.append((place, self._places[at]))
        self._places.insert(at, place)
        shared = 0
        if neighbours:
            left, right = np.asarray(neighbours, np.int64).T
            shared = int(self._tree.between(left, right).max())
        return self._tokens[row] - shared


@dataclass
class _Branch:
    """A node of the tree: a row, or a point where rows part."""

    depth: int  # tokens from the root
    longest: int  # tokens of the longest row below
    first: int  # number of the first row below
    children: list[_Branch] = field(default_factory=list)

    def add(self, child: _Branch) -> None:
        self.children.append(child)
        self.longest, self.first = max(self.longest, child.longest), min(self.first, child.first)


def _depth_first(rows: list[bytes]) -> tuple[Index, Index]:
    """Return order and shared tokens of rows of :data:`_WIDTH` bytes a token."""
    order: list[int] = []
    shared: list[int] = []
    pending = [(_tree(rows), 0)] if rows else []
    while pending:
        branch, common = pending.pop()
        if not branch.children:
            order.append(branch.first)
            shared.append(common)
            continue
        children = sorted(branch.children, key=lambda child: (-child.longest, child.first))
        pending += [(child, branch.depth) for child in reversed(children[1:])]
        pending.append((children[0], common))
    return np.asarray(order, np.int64), np.asarray(shared, np.int64)


def _tree(rows: list[bytes]) -> _Branch:
    """Build the tree from the rows in lexicographic order, in which neighbours share most."""
    order = sorted(range(len(rows)), key=rows.__getitem__)

    def leaf(row: int) -> _Branch:
        return _Branch(len(rows[row]) // _WIDTH, len(rows[row]) // _WIDTH, row)

    path, last = [_Branch(0, 0, order[0])], leaf(order[0])
    for left, right in zip(order, order[1:], strict=False):
        common = _common_tokens(rows[left], rows[right])
        while path[-1].depth > common:
            path[-1].add(last)
            last = path.pop()
        if path[-1].depth < common:
            path.append(_Branch(common, 0, right))
        path[-1].add(last)
        last = leaf(right)
    while path:
        path[-1].add(last)
        last = path.pop()
    return last


def _common_tokens(left: bytes, right: bytes) -> int:
    """Count the tokens at the beginning of both rows that are equal."""
    count = min(len(left), len(right)) // _WIDTH
    differs = np.frombuffer(left, ">i8", count) != np.frombuffer(right, ">i8", count)
    return int(differs.argmax()) if bool(differs.any()) else count


def _big_endian(columns: Sequence[Ragged]) -> list[bytes]:
    """Return each row as bytes; rows with the same first tokens are neighbours when sorted. Ids of images have more than 32 bits."""
    parts = []
    for column in columns:
        values, offsets = column.values.cpu().numpy().astype(">i8").tobytes(), (_WIDTH * column.offsets).tolist()
        parts.append([values[a:b] for a, b in zip(offsets, offsets[1:], strict=False)])
    return [b"".join(pieces) for pieces in zip(*parts, strict=True)]
