"""Number partitioning: divide weighted items into parts of nearly equal sum."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def karmarkar_karp(costs: NDArray[np.float64], parts: int, *, equal_count: bool = False) -> list[list[int]]:
    """Partition items into ``parts`` of nearly equal sum, by largest differencing.

    The method of Karmarkar and Karp (1982) for several parts: keep partial partitions, and repeatedly merge the two with the
    widest spread, heavy parts of one with light parts of the other.

    Args:
        costs: ``[n]``, positive.
        parts: number of parts, at least 1.
        equal_count: give every part the same number of items, up to one.

    Returns:
        Item indices of each part, ascending. With ``n >= parts`` no part is empty.
    """
    follower = np.full(len(costs), -1, np.int64)  # the next item in the same part
    heap = [(-state.spread(parts), number, state) for number, state in enumerate(_first(costs, parts, equal_count))]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        widest, (_, _, second) = heapq.heappop(heap)[2], heapq.heappop(heap)
        merged = widest.merge(second, parts, follower)
        heapq.heappush(heap, (-merged.spread(parts), number, merged))
        number += 1
    partition: list[list[int]] = [[] for _ in range(parts)]
    heads = heap[0][2].heads.tolist() if heap else []
    chain = follower.tolist()
    for part, item in zip(partition, heads, strict=False):
        while item >= 0:
            part.append(item)
            item = chain[item]
        part.sort()
    return partition


@dataclass(frozen=True)
class _Partial:
    """A partition of some of the items: sums of its non-empty parts, heaviest first, and the first and last item of each."""

    sums: NDArray[np.float64]
    heads: NDArray[np.int64]
    tails: NDArray[np.int64]

    def spread(self, parts: int) -> float:
        return float(self.sums[0] - (self.sums[-1] if len(self.sums) == parts else 0.0))

    def merge(self, other: _Partial, parts: int, follower: NDArray[np.int64]) -> _Partial:
        """Merge both: part i of this one with part ``parts - 1 - i`` of the other."""
        count, others = len(self.sums), len(other.sums)
        alone, both = min(count, parts - others), max(0, count + others - parts)
        sums, heads, tails = other.sums[::-1], other.heads[::-1], other.tails[::-1]
        if both:
            follower[self.tails[alone:]] = heads[:both]
        sums_of_both = np.concatenate((self.sums[:alone], self.sums[alone:] + sums[:both], sums[both:]))
        heads = np.concatenate((self.heads, heads[both:]))
        tails = np.concatenate((self.tails[:alone], tails))
        order = np.argsort(-sums_of_both, kind="stable")
        return _Partial(sums_of_both[order], heads[order], tails[order])


def _first(costs: NDArray[np.float64], parts: int, equal_count: bool) -> Iterator[_Partial]:
    """Yield the initial partial partitions: one item each, or for equal counts one item for every part."""
    order = np.argsort(-np.asarray(costs, np.float64), kind="stable")
    size = parts if equal_count else 1
    for start in range(0, len(order), size):
        items = order[start : start + size]
        yield _Partial(np.asarray(costs, np.float64)[items], items, items)
