"""A worker group on Ray: one call on it is a call on each of its workers, and one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError

from hone.cluster.context import RoleSpec
from hone.cluster.dispatch import Answer, Collect, Dispatch, RowGroups, Split, dispatch_of
from hone.cluster.partition import Partition, balanced
from hone.cluster.remote_batch import RemoteBatch, RowInfo, Stored
from hone.errors import HoneError
from hone.insight import activity
from hone.training.layout import Layout


class RayAnswer(Answer):
    """The answers of workers under way, and what becomes of them."""

    def __init__(self, refs: Sequence[Any], finish: Callable[[list[Any]], Any], what: str, whom: str) -> None:
        self._refs, self._finish, self._what, self._whom = list(refs), finish, what, whom

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        with activity.waiting(self._what, on=[self._whom]):
            try:
                values = await asyncio.gather(*self._refs)
            except RayTaskError as error:
                raise cause_of(error) from None
        return self._finish(values)

    def result(self) -> Any:
        """Block until all have answered."""
        with activity.waiting(self._what, on=[self._whom]):
            return self._finish(answers(self._refs))


class WorkerGroup:
    """All workers that play a role.

    Attributes:
        dp_size: data-parallel ranks.

    Args:
        role: what they play.
        hosts: the processes, by rank.
        pool: name of their pool.
        layout: how they share a model; of a role whose workers each answer for their rows alone it is pure data
            parallelism.
        balance: whether rows are divided by their work; otherwise in order.
    """

    def __init__(
        self, role: RoleSpec, hosts: Sequence[Any], pool: str, layout: Layout, *, balance: bool = True
    ) -> None:
        self._role, self._hosts, self._pool, self._balance = role, list(hosts), pool, balance
        self._layout = Layout(len(hosts), dp_shard=len(hosts)) if role.whole else layout
        self.dp_size = self._layout.dp_size

    def __getattr__(self, method: str) -> Callable[..., RayAnswer]:
        spec = dispatch_of(self._role.cls, method)

        def ask(*args: Any, **kwargs: Any) -> RayAnswer:
            return self._ask(spec, method, args, kwargs)

        return ask

    def partition(self, batch: RemoteBatch, groups: RowGroups | None = None, *, equal: bool = False) -> Partition:
        """Which rows of a batch each data-parallel rank gets."""
        if self.dp_size == 1:
            return Partition.chunks(len(batch), 1)
        return balanced(batch.info.lengths, self.dp_size, groups=groups, equal=equal, by_work=self._balance)

    # going out -------------------------------------------------------------------------------------------------------

    def _ask(self, spec: Dispatch, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> RayAnswer:
        partition, info = None, _rows_of(args)
        if spec.split is Split.ROWS:
            partition, calls = self._split(spec, args, kwargs)
        elif spec.split is Split.RANKS:
            calls = [([a[rank] for a in args], {n: a[rank] for n, a in kwargs.items()}) for rank in self._ranks]
        else:
            whole = [_whole(argument, spec) for argument in args]
            calls = [(whole, kwargs)] * (1 if spec.split is Split.ZERO else len(self._hosts))
        refs = [
            host.call.remote(self._role.name, method, sent, named)
            for host, (sent, named) in zip(self._hosts, calls, strict=False)
        ]

        def finish(values: list[Any]) -> Any:
            return self._collect(spec, values, partition, info)

        return RayAnswer(refs, finish, f"{self._role.name}.{method}", self._pool)

    @property
    def _ranks(self) -> range:
        return range(len(self._hosts))

    def _split(self, spec: Dispatch, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Partition, list[Any]]:
        """The partition, and the arguments of every rank."""
        first, *others = args
        if isinstance(first, RemoteBatch):
            groups = next((argument for argument in others if isinstance(argument, RowGroups)), None)
            partition = self.partition(first, groups, equal=spec.equal)
            parts: Sequence[Any] = first.shards(partition.rows, objects=spec.objects)
        else:
            partition = Partition.of(Partition.chunks(len(first), self.dp_size).rows, equal=spec.equal)
            parts = [[first[row] for row in rows.tolist()] for rows in partition.rows]
        of_rank = [
            [part, *(partition.local(a, rank) if isinstance(a, RowGroups) else a for a in others)]
            for rank, part in enumerate(parts)
        ]
        return partition, [(of_rank[self._layout.dp_rank(rank)], kwargs) for rank in self._ranks]

    # coming back -----------------------------------------------------------------------------------------------------

    def _collect(self, spec: Dispatch, values: list[Any], partition: Partition | None, info: RowInfo | None) -> Any:
        if spec.collect is Collect.EACH:
            return values
        if spec.collect is Collect.FIRST:
            return _batch([values[0]], info) if isinstance(values[0], Stored) else values[0]
        heads = [value for rank, value in enumerate(values) if self._layout.leads(rank)]
        if not isinstance(spec.collect, Collect):
            return spec.collect(heads)
        if isinstance(heads[0], Stored):
            return _batch(heads, info, partition)
        assert partition is not None
        count = sum(map(len, partition.rows)) - sum(partition.padded)
        rank, place = partition.sources(count)
        return [heads[r][p] for r, p in zip(rank.tolist(), place.tolist(), strict=True)]


def answers(refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """Wait for workers' answers; what one raises is raised as it was raised there."""
    try:
        return ray.get(list(refs), timeout=timeout)
    except RayTaskError as error:
        raise cause_of(error) from None


def cause_of(error: RayTaskError) -> BaseException:
    """What really happened in the worker: the user's mistake as it was raised there, else the error with its traceback."""
    cause = error.cause
    if isinstance(cause, HoneError):
        return cause
    return error.as_instanceof_cause()


def _rows_of(args: Sequence[Any]) -> RowInfo | None:
    """Rows of the first batch among the arguments."""
    return next((argument.info for argument in args if isinstance(argument, RemoteBatch)), None)


def _whole(argument: Any, spec: Dispatch) -> Any:
    """A batch with all its rows, or any other argument, as it is sent."""
    if not isinstance(argument, RemoteBatch):
        return argument
    return argument.shards([np.arange(len(argument))], objects=spec.objects)[0]


def _batch(parts: Sequence[Stored], info: RowInfo | None, partition: Partition | None = None) -> RemoteBatch:
    """The batch that workers have stored: rows that it names itself, in the order of the ranks, or those of the question."""
    if all(part.info is not None for part in parts):
        sizes = [part.size for part in parts]
        block = np.repeat(np.arange(len(parts)), sizes)
        row = np.concatenate([np.arange(size) for size in sizes])
        return RemoteBatch.of(parts, RowInfo.concat([part.info for part in parts if part.info]), block, row)
    assert info is not None, "a batch without uid answers a question without a batch"
    if partition is None:
        return RemoteBatch.of(parts, info, np.zeros(len(info), np.int64), np.arange(len(info)))
    return RemoteBatch.of(parts, info, *partition.sources(len(info)))
