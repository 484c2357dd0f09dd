"""Collectives over the data-parallel ranks of a mini-batch: totals, number of micro-batches, statistics, and rows.

Data-parallel ranks have different rows of a mini-batch. The results, and decisions based on them, are the same on all
ranks. Each method is collective: all ranks call it in the same order.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hone.data.batch import Batch
from hone.training.objectives import GatheredRows, Statistics, Totals


class RankGroup(Protocol):
    """The data-parallel ranks, from the view of one of them; ``size`` of them have different rows."""

    @property
    def size(self) -> int: ...

    def sum_totals(self, totals: Totals) -> Totals:
        """Return the sum of the totals of all ranks."""
        ...

    def largest(self, count: int) -> int:
        """Return the largest count of any rank."""
        ...

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank; all ranks have the same number of flags."""
        ...

    def gather_statistics(self, statistics: list[Statistics]) -> list[Statistics]:
        """Return the statistics of all ranks, in the order of ranks."""
        ...

    def gather_rows(self, local: Batch) -> GatheredRows:
        """Return the rows of all ranks, and the indices of this rank's rows."""
        ...


class SingleRank:
    """A single rank with all rows."""

    size = 1

    def sum_totals(self, totals: Totals) -> Totals:
        return totals

    def largest(self, count: int) -> int:
        return count

    def any_rank(self, flags: list[bool]) -> list[bool]:
        return flags

    def gather_statistics(self, statistics: list[Statistics]) -> list[Statistics]:
        return statistics

    def gather_rows(self, local: Batch) -> GatheredRows:
        return GatheredRows(local, range(len(local)))


class ProcessRanks:
    """Ranks that are processes of a ``torch.distributed`` group. ``device``: for the reduced tensors; must fit the
    group's backend.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.size = dist.get_world_size(group)

    def sum_totals(self, totals: Totals) -> Totals:
        counts = torch.tensor([totals.tokens, totals.sequences], dtype=torch.int64, device=self._device)
        dist.all_reduce(counts, group=self._group)
        tokens, sequences = counts.tolist()
        return Totals(tokens, sequences)

    def largest(self, count: int) -> int:
        largest = torch.tensor(count, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return int(largest)

    def any_rank(self, flags: list[bool]) -> list[bool]:
        largest = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in largest.tolist()]

    def gather_statistics(self, statistics: list[Statistics]) -> list[Statistics]:
        local = [{name: (float(value), float(weight)) for name, (value, weight) in one.items()} for one in statistics]
        return [one for rank_statistics in self._gather(local) for one in rank_statistics]

    def gather_rows(self, local: Batch) -> GatheredRows:
        batches: list[Batch] = self._gather(local)
        first = sum(len(batch) for batch in batches[: dist.get_rank(self._group)])
        return GatheredRows(Batch.concat([batch for batch in batches if len(batch)]), range(first, first + len(local)))

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values
