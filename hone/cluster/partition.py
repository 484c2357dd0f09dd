"""Which rows of a batch go to which data-parallel rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hone.cluster.dispatch import RowGroups
from hone.data.balance import CostModel, Lengths, balance, in_order

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """Rows of every data-parallel rank.

    Attributes:
        rows: row numbers of each rank.
        padded: how many at the end of each rank's are repetitions, made so that the ranks have equally many or at least one.
    """

    rows: Sequence[Rows]
    padded: Sequence[int]

    @classmethod
    def chunks(cls, count: int, ranks: int) -> Partition:
        """Consecutive rows; sizes differ by at most one, the larger ones first, and some ranks may have none."""
        return cls(np.array_split(np.arange(count), ranks), [0] * ranks)

    @classmethod
    def of(cls, rows: Sequence[Rows], *, equal: bool) -> Partition:
        """Fill up: every rank has a row at least, or with ``equal`` as many as the fullest.

        Raises:
            ValueError: there is no row at all.
        """
        most = max((len(part) for part in rows), default=0)
        if most == 0:
            raise ValueError("a batch without rows cannot be split")
        wanted = [most if equal else max(len(part), 1) for part in rows]
        spare = np.concatenate(rows)
        filled, padded, used = [], [], 0
        for part, size in zip(rows, wanted, strict=True):
            missing = size - len(part)
            filler = spare[(used + np.arange(missing)) % len(spare)]
            filled.append(np.concatenate([part, filler]).astype(np.int64) if missing else part)
            padded.append(missing)
            used += missing
        return cls(filled, padded)

    @functools.cached_property
    def sources(self) -> tuple[Rows, Rows]:
        """Of every row of the batch the rank that has it, and where among the rank's rows.

        Raises:
            ValueError: not every row stands in exactly one rank, repetitions apart.
        """
        own = self.own
        count = sum(map(len, own))
        rank, place = np.full(count, -1), np.zeros(count, np.int64)
        for number, rows in enumerate(own):
            if len(rows) and rows.max() >= count:
                break
            rank[rows], place[rows] = number, np.arange(len(rows))
        if (rank < 0).any():
            raise ValueError(f"the ranks do not have each of {count} rows once")
        return rank, place

    @property
    def own(self) -> list[Rows]:
        """Rows of every rank without repetitions."""
        return [rows[: len(rows) - extra] for rows, extra in zip(self.rows, self.padded, strict=True)]

    def local(self, groups: RowGroups) -> list[RowGroups]:
        """Groups of rows of the batch as each rank sees them: of each group the rows that it has, by their place there."""
        rank, place = self.sources
        seen: list[list[list[int]]] = [[] for _ in self.rows]
        for group in groups:
            rows = np.asarray(group, np.int64)
            order = np.argsort(rank[rows], kind="stable")
            cuts = np.searchsorted(rank[rows][order], np.arange(1, len(self.rows)))
            places, ends = place[rows][order].tolist(), [0, *cuts.tolist(), len(rows)]
            for number, part in enumerate(seen):
                part.append(places[ends[number] : ends[number + 1]])
        return [RowGroups(part) for part in seen]


def balanced(
    lengths: Lengths,
    ranks: int,
    *,
    groups: RowGroups | None = None,
    equal: bool = False,
    by_work: bool = True,
    cost: CostModel | None = None,
) -> Partition:
    """Give every rank the same work, in each of ``groups`` (the mini-batches of a step) if there are any.

    A row that stands in several groups, in several passes over the data, goes where the first of them puts it.

    Args:
        lengths: of the rows of the batch.
        ranks: data-parallel ranks.
        equal: whether every rank must have equally many rows.
        by_work: whether to give the ranks equal work; otherwise rows go in order.
        cost: how work is counted.
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    taken = np.zeros(len(lengths), bool)
    for group in groups or [range(len(lengths))]:
        rows = np.asarray([row for row in group if not taken[row]], np.int64)
        taken[rows] = True
        for part, chosen in zip(parts, _divided(lengths, rows, ranks, equal, by_work, cost), strict=True):
            part += chosen
    return Partition.of([np.asarray(sorted(part), np.int64) for part in parts], equal=equal)


def _divided(
    lengths: Lengths, rows: Rows, ranks: int, equal: bool, by_work: bool, cost: CostModel | None
) -> list[list[int]]:
    if len(rows) <= ranks:
        return [[int(rows[rank])] if rank < len(rows) else [] for rank in range(ranks)]
    units = None if lengths.unit_of is None else lengths.unit_of[rows]
    part = Lengths(lengths.prompts[rows], lengths.responses[rows], lengths.group_of[rows], units)
    found = (by_work and balance(part, ranks, cost, equal_count=equal)) or in_order(len(rows), ranks)
    return [rows[chosen].tolist() for chosen in found]
