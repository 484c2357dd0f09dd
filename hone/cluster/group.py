"""Group of a role's workers: one call on it becomes a call on each worker, with one combined result."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.cluster.columns import assembled, stored
from hone.cluster.context import RoleSpec
from hone.cluster.dispatch import Answer, Collect, Dispatch, RowGroups, Split, offer_methods
from hone.cluster.handles import AnyBatch, rows_of
from hone.cluster.remote_batch import RemoteBatch, RowInfo, Stored
from hone.config.parallel import Layout
from hone.config.trees import AnyConfig, model_block
from hone.data.balance import CostModel, Lengths, balance, balance_metrics, in_order
from hone.data.batch import Batch

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
    return list(rows_of(lengths.unit_of.tolist()).values())


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
        offer_methods(self, role.cls, self._ask)

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


class WorkerRuntime:
    """Base class of the runtimes with several processes; see :class:`~hone.cluster.runtime.Runtime`.

    Args:
        put: stores an object and returns its reference.
        get: returns the objects of references.
    """

    def __init__(self, config: AnyConfig, put: Callable[[Any], Any], get: Callable[[list[Any]], list[Any]]) -> None:
        self._config, self._put, self._get = config, put, get
        self._groups: dict[str, Any] = {}

    def group(self, name: str) -> Any:
        return self._groups[name]

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def put(self, batch: Batch) -> RemoteBatch:
        return stored_batch([stored(batch, self._put)])

    def fetch(self, batch: AnyBatch) -> Batch:
        """Return a batch with its columns in this process; they are read only."""
        assert isinstance(batch, RemoteBatch)
        (shard,) = batch.shards([np.arange(len(batch))], objects=True)
        return assembled(shard, self._get)

    @property
    def _division(self) -> dict[str, Any]:
        """Return the arguments by which groups divide rows over their ranks."""
        cost = CostModel.from_directory(model_block(self._config)[1].path)
        return {"balance": self._config.trainer.balance_batch, "cost": cost}
