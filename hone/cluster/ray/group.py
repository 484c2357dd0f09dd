"""A worker group on Ray: one call on it is a call on each of its workers, and one answer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ray.exceptions import RayError

from hone.cluster.context import RoleSpec
from hone.cluster.dispatch import Answer, Collect, Dispatch, RowGroups, Split, dispatch_of
from hone.cluster.partition import Partition, balanced
from hone.cluster.ray.failures import Failures, Post
from hone.cluster.remote_batch import RemoteBatch, RowInfo, Stored
from hone.data.balance import CostModel, balance_metrics
from hone.insight import activity
from hone.training.layout import Layout


class RayAnswer(Answer):
    """The answers of workers under way, and what becomes of them."""

    def __init__(
        self,
        posts: Sequence[Post],
        finish: Callable[[list[Any]], Any],
        what: str,
        whom: str,
        failures: Failures,
        balance: Callable[[], dict[str, float]],
    ) -> None:
        self._posts, self._finish, self._what, self._whom = list(posts), finish, what, whom
        self._failures, self.balance = failures, balance

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        with activity.waiting(self._what, on=[self._whom]):
            try:
                values = await asyncio.gather(*(post.ref for post in self._posts))
            except RayError as error:
                raise await asyncio.to_thread(self._failures.explain, self._posts, error) from None
        return self._finish(values)

    def result(self) -> Any:
        """Block until all have answered."""
        with activity.waiting(self._what, on=[self._whom]):
            return self._finish(self._failures.answers(self._posts))


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
        failures: explains calls that fail.
        balance: whether rows are divided by their work; otherwise in order.
        cost: how work is counted.
    """

    def __init__(
        self,
        role: RoleSpec,
        hosts: Sequence[Any],
        pool: str,
        layout: Layout,
        failures: Failures,
        *,
        balance: bool = True,
        cost: CostModel | None = None,
    ) -> None:
        self._role, self._hosts, self._pool, self._balance = role, list(hosts), pool, balance
        self._failures, self._cost = failures, cost
        self._layout = Layout(len(hosts), dp_shard=len(hosts)) if role.whole else layout
        self.dp_size = self._layout.dp_size

    def __getattr__(self, method: str) -> Callable[..., RayAnswer]:
        spec = dispatch_of(self._role.cls, method)

        def ask(*args: Any, **kwargs: Any) -> RayAnswer:
            return self._ask(spec, method, args, kwargs)

        return ask

    def partition(self, batch: RemoteBatch, groups: RowGroups | None = None, *, equal: bool = False) -> Partition:
        """Which rows of a batch each data-parallel rank gets; found once for all calls on the same rows."""
        if self.dp_size == 1:
            return Partition.chunks(len(batch), 1)
        cut = None if groups is None else tuple(map(tuple, groups))
        if cut == (tuple(range(len(batch))),):
            cut = None  # one mini-batch is the batch
        key, known = (self.dp_size, equal, self._balance, self._cost, cut), batch.info.partitions
        if key not in known:
            minis = None if cut is None else RowGroups(cut)
            known[key] = balanced(
                batch.info.lengths, self.dp_size, groups=minis, equal=equal, by_work=self._balance, cost=self._cost
            )
        return known[key]

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
        posts = [
            Post(f"{self._pool}[{rank}]", host.call.remote(self._role.name, method, sent, named))
            for rank, (host, (sent, named)) in enumerate(zip(self._hosts, calls, strict=False))
        ]

        def finish(values: list[Any]) -> Any:
            return self._collect(spec, values, partition, info)

        def balance() -> dict[str, float]:
            if partition is None or info is None or self.dp_size == 1:
                return {}
            return balance_metrics(info.lengths, partition.own, self._cost)

        return RayAnswer(posts, finish, f"{self._role.name}.{method}", self._pool, self._failures, balance)

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
            partition = Partition.chunks(len(first), self.dp_size)
            parts = [[first[row] for row in rows.tolist()] for rows in partition.rows]
        local = [partition.local(a) if isinstance(a, RowGroups) else [a] * self.dp_size for a in others]
        of_rank = [[part, *(a[rank] for a in local)] for rank, part in enumerate(parts)]
        return partition, [(of_rank[self._layout.dp_rank(rank)], kwargs) for rank in self._ranks]

    # coming back -----------------------------------------------------------------------------------------------------

    def _collect(self, spec: Dispatch, values: list[Any], partition: Partition | None, info: RowInfo | None) -> Any:
        if spec.collect is Collect.EACH:
            return values
        if spec.collect in (Collect.FIRST, Collect.KEPT):
            return _batch([values[0]], info) if isinstance(values[0], Stored) else values[0]
        heads = [value for rank, value in enumerate(values) if self._layout.leads(rank)]
        if not isinstance(spec.collect, Collect):
            return spec.collect(heads)
        if isinstance(heads[0], Stored):
            return _batch(heads, info, partition)
        assert partition is not None
        rank, place = partition.sources
        return [heads[r][p] for r, p in zip(rank.tolist(), place.tolist(), strict=True)]


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
        return RemoteBatch.of(parts, info, *_in_one_block(len(info)))
    return RemoteBatch.of(parts, info, *partition.sources)


@functools.lru_cache(maxsize=8)
def _in_one_block(count: int) -> tuple[Any, Any]:
    """Block and row of each row, where one block holds all; the same arrays for all that lie so."""
    return np.zeros(count, np.int64), np.arange(count)
