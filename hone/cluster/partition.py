"""Assignment of the rows of a batch to data-parallel ranks."""

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
        padded: number of repeated rows at the end of each rank, added so that ranks have equal counts or at least one row.
    """

    rows: Sequence[Rows]
    padded: Sequence[int]

    @classmethod
    def chunks(cls, count: int, ranks: int) -> Partition:
        """Return consecutive rows; sizes differ by at most one, larger ones first, and some ranks may have none."""
        return cls(np.array_split(np.arange(count), ranks), [0] * ranks)

    @classmethod
    def filled(cls, rows: Sequence[Rows], *, equal: bool) -> Partition:
        """Repeat rows so that every rank has one, or with ``equal`` as many as the rank with most rows.

        Raises:
            ValueError: there is no row.
        """
        most = max((len(part) for part in rows), default=0)
        if most == 0:
            raise ValueError("a batch without rows cannot be split")
        sizes = [most if equal else max(len(part), 1) for part in rows]
        spare = np.concatenate(rows)
        filled, padded, used = [], [], 0
        for part, size in zip(rows, sizes, strict=True):
            missing = size - len(part)
            filler = spare[(used + np.arange(missing)) % len(spare)]
            filled.append(np.concatenate([part, filler]).astype(np.int64) if missing else part)
            padded.append(missing)
            used += missing
        return cls(filled, padded)

    @functools.cached_property
    def sources(self) -> tuple[Rows, Rows]:
        """Return the rank of every row of the batch, and its position among the rank's rows.

        Raises:
            ValueError: a row is not on exactly one rank (repetitions not counted).
        """
        unpadded = self.unpadded
        count = sum(map(len, unpadded))
        rank, place = np.full(count, -1), np.zeros(count, np.int64)
        for number, rows in enumerate(unpadded):
            if len(rows) and rows.max() >= count:
                break
            rank[rows], place[rows] = number, np.arange(len(rows))
        if (rank < 0).any():
            raise ValueError(f"the ranks do not have each of {count} rows exactly once")
        return rank, place

    @property
    def unpadded(self) -> list[Rows]:
        """Return the rows of every rank without repetitions."""
        return [rows[: len(rows) - extra] for rows, extra in zip(self.rows, self.padded, strict=True)]

    def local(self, groups: RowGroups) -> list[RowGroups]:
        """Return each rank's rows of every group, as positions among the rank's rows."""
        rank, place = self.sources
        groups_of_rank: list[list[list[int]]] = [[] for _ in self.rows]
        for group in groups:
            rows = np.asarray(group, np.int64)
            order = np.argsort(rank[rows], kind="stable")
            cuts = np.searchsorted(rank[rows][order], np.arange(1, len(self.rows)))
            places, ends = place[rows][order].tolist(), [0, *cuts.tolist(), len(rows)]
            for number, part in enumerate(groups_of_rank):
                part.append(places[ends[number] : ends[number + 1]])
        return [RowGroups(part) for part in groups_of_rank]


def balanced(
    lengths: Lengths,
    ranks: int,
    *,
    groups: RowGroups | None = None,
    equal: bool = False,
    by_work: bool = True,
    cost: CostModel | None = None,
) -> Partition:
    """Give every rank the same work, in each of ``groups`` (the mini-batches of a step) if given.

    A row that is in several groups, in several passes over the data, goes to the rank of the first.

    Args:
        lengths: lengths of the rows of the batch.
        ranks: number of data-parallel ranks.
        equal: whether every rank must have the same number of rows.
        by_work: whether to balance work; otherwise rows go in order.
        cost: cost model of the work.
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    assigned = np.zeros(len(lengths), bool)
    for group in groups or [range(len(lengths))]:
        rows = np.asarray([row for row in group if not assigned[row]], np.int64)
        assigned[rows] = True
        for part, chosen in zip(parts, _divided(lengths, rows, ranks, equal, by_work, cost), strict=True):
            part += chosen
    return Partition.filled([np.asarray(sorted(part), np.int64) for part in parts], equal=equal)


def _divided(
    lengths: Lengths, rows: Rows, ranks: int, equal: bool, by_work: bool, cost: CostModel | None
) -> list[list[int]]:
    chosen = lengths.take(rows)
    units = _units(chosen)
    if by_work and len(units) > ranks:
        division = balance(chosen, ranks, cost, equal_count=equal)
        if division is not None:
            return [rows[part].tolist() for part in division]
    if len(units) <= ranks:
        parts = [[unit] for unit in range(len(units))] + [[]] * (ranks - len(units))
    else:
        parts = in_order(len(units), ranks)
    return [rows[[row for unit in part for row in units[unit]]].tolist() for part in parts]


def _units(lengths: Lengths) -> list[list[int]]:
    """Return the rows in groups that stay together, in the order of their first rows."""
    if lengths.unit_of is None:
        return [[row] for row in range(len(lengths))]
    units: dict[int, list[int]] = {}
    for row, unit in enumerate(lengths.unit_of.tolist()):
        units.setdefault(unit, []).append(row)
    return list(units.values())
