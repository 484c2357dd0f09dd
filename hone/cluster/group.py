"""Group of a role's workers: one call on it becomes a call on each worker, with one combined result."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hone.cluster.context import RoleSpec
from hone.cluster.dispatch import Answer, Collect, Dispatch, RowGroups, Split, dispatched
from hone.cluster.partition import Partition, balanced
from hone.cluster.remote_batch import RemoteBatch, RowInfo, Stored
from hone.config.parallel_layout import Layout
from hone.data.balance import CostModel, balance_metrics

Arguments = tuple[Sequence[Any], dict[str, Any]]
"""Positional and named arguments of a call on one worker."""


class WorkerGroup(ABC):
    """All workers of a role, with a method for each ``@dispatch`` method of its class. A runtime's class sends the calls.

    Attributes:
        dp_size: number of data-parallel ranks.

    Args:
        role: role of the workers.
        world: number of processes.
        layout: division of a model over them; a replicated role uses pure data parallelism.
        balance: whether rows are divided by work; otherwise in order.
        cost: cost model of the work.
    """

    def __init__(
        self, role: RoleSpec, world: int, layout: Layout, *, balance: bool = True, cost: CostModel | None = None
    ) -> None:
        self.role, self._world, self._balance, self._cost = role, world, balance, cost
        self._layout = _in_groups(world, role.group) if role.replicated else layout
        self.dp_size = self._layout.dp_size
        for name, spec in dispatched(role.cls).items():
            setattr(self, name, functools.partial(self._ask, spec, name))

    @abstractmethod
    def _send(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        finish: Callable[[list[Any]], Any],
        balance: Callable[[], dict[str, float]],
    ) -> Answer[Any]:
        """Call a method on some workers.

        Args:
            method: name of the method.
            arguments: arguments of each called rank; batches are :class:`~hone.cluster.remote_batch.Shard` objects.
            finish: combines the results, in the order of ``arguments``.
            balance: returns the metrics of the division.
        """

    def partition(self, batch: RemoteBatch, groups: RowGroups | None = None, *, equal: bool = False) -> Partition:
        """Return the rows of each data-parallel rank; cached for all calls on the same rows."""
        if self.dp_size == 1:
            return Partition.chunks(len(batch), 1)
        mini_rows = None if groups is None else tuple(map(tuple, groups))
        if mini_rows == (tuple(range(len(batch))),):
            mini_rows = None  # one mini-batch is the batch
        key, cached = (self.dp_size, equal, self._balance, self._cost, mini_rows), batch.info.partitions
        if key not in cached:
            minis = None if mini_rows is None else RowGroups(mini_rows)
            cached[key] = balanced(
                batch.info.lengths, self.dp_size, groups=minis, equal=equal, by_work=self._balance, cost=self._cost
            )
        return cached[key]

    # going out -------------------------------------------------------------------------------------------------------

    def _ask(self, spec: Dispatch, method: str, *args: Any, **kwargs: Any) -> Answer[Any]:
        partition, info, ranks = None, _rows_of(args), self._called(spec)
        if spec.split is Split.ROWS:
            partition, arguments = self._split(spec, ranks, args, kwargs)
        elif spec.split is Split.RANKS:
            arguments = [([a[rank] for a in args], {n: a[rank] for n, a in kwargs.items()}) for rank in ranks]
        elif spec.split is Split.ONE:
            ranks = [self._layout.ranks_of(args[0])[0]]
            arguments = [([_whole(argument, spec) for argument in args[1:]], kwargs)]
        else:
            shared = [_whole(argument, spec) for argument in args]
            arguments = [(shared, kwargs)] * len(ranks)

        def finish(values: list[Any]) -> Any:
            return self._collect(spec, dict(zip(ranks, values, strict=True)), partition, info)

        def balance() -> dict[str, float]:
            if partition is None or info is None or self.dp_size == 1:
                return {}
            return balance_metrics(info.lengths, partition.unpadded, self._cost)

        return self._send(method, dict(zip(ranks, arguments, strict=True)), finish, balance)

    def _called(self, spec: Dispatch) -> list[int]:
        """Return the ranks that a call goes to, unless it names one."""
        if spec.split is Split.ZERO:
            return [0]
        ranks = range(self._world)
        return [rank for rank in ranks if spec.lenders or self.role.group == 1 or self._layout.leads(rank)]

    def _split(
        self, spec: Dispatch, ranks: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Partition, list[Any]]:
        """Return the partition, and the arguments of these ranks."""
        first, *others = args
        if isinstance(first, RemoteBatch):
            groups = next((argument for argument in others if isinstance(argument, RowGroups)), None)
            partition = self.partition(first, groups, equal=spec.equal)
            parts: Sequence[Any] = first.shards(partition.rows, objects=spec.objects)
        else:
            partition = Partition.chunks(len(first), self.dp_size)
            parts = [[first[row] for row in rows.tolist()] for rows in partition.rows]
        local = [partition.local(a) if isinstance(a, RowGroups) else [a] * self.dp_size for a in others]
        of_rank = [[part, *(a[rank] for a in local)] for rank, part in enumerate(parts)]
        return partition, [(of_rank[self._layout.dp_rank(rank)], kwargs) for rank in ranks]

    # coming back -----------------------------------------------------------------------------------------------------

    def _collect(
        self, spec: Dispatch, values: dict[int, Any], partition: Partition | None, info: RowInfo | None
    ) -> Any:
        """Combine the results, by rank."""
        if spec.collect is Collect.EACH:
            return list(values.values())
        if spec.collect in (Collect.FIRST, Collect.REMOTE):
            first = next(iter(values.values()))
            return stored_batch([first], info) if isinstance(first, Stored) else first
        heads = [value for rank, value in values.items() if self._layout.leads(rank)]
        if not isinstance(spec.collect, Collect):
            return spec.collect(heads)
        if isinstance(heads[0], Stored):
            return stored_batch(heads, info, partition)
        assert partition is not None
        rank, place = partition.sources
        return [heads[r][p] for r, p in zip(rank.tolist(), place.tolist(), strict=True)]


def _in_groups(world: int, group: int) -> Layout:
    """Return the layout of processes that work on their rows in groups; a group acts like ranks that share every matrix."""
    return Layout(world, dp_shard=world // group, tensor=group)


def _rows_of(args: Sequence[Any]) -> RowInfo | None:
    """Return the rows of the first batch among the arguments."""
    return next((argument.info for argument in args if isinstance(argument, RemoteBatch)), None)


def _whole(argument: Any, spec: Dispatch) -> Any:
    """Return a batch with all its rows, or any other argument, in the form that is sent."""
    if not isinstance(argument, RemoteBatch):
        return argument
    return argument.shards([np.arange(len(argument))], objects=spec.objects)[0]


def stored_batch(
    parts: Sequence[Stored], info: RowInfo | None = None, partition: Partition | None = None
) -> RemoteBatch:
    """Return the batch that workers stored, with its rows in rank order or those of the argument."""
    if all(part.info is not None for part in parts):
        sizes = [part.size for part in parts]
        block = np.repeat(np.arange(len(parts)), sizes)
        row = np.concatenate([np.arange(size) for size in sizes])
        return RemoteBatch.from_stored(parts, RowInfo.concat([part.info for part in parts if part.info]), block, row)
    assert info is not None, "a call without a batch returned a batch without uid"
    if partition is None:
        return RemoteBatch.from_stored(parts, info, *_in_one_block(len(info)))
    return RemoteBatch.from_stored(parts, info, *partition.sources)


@functools.lru_cache(maxsize=8)
def _in_one_block(count: int) -> tuple[Any, Any]:
    """Return block and row of each row if one block holds all; cached, so that equal layouts share the arrays."""
    return np.zeros(count, np.int64), np.arange(count)
