"""Worker group on Ray: a call on a worker is a call on a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError

from hone.cluster.context import RoleSpec
from hone.cluster.dispatch import Answer
from hone.cluster.group import Arguments, WorkerGroup
from hone.cluster.ray.failures import Failures, PendingCall
from hone.config.parallel_layout import Layout
from hone.data.balance import CostModel
from hone.insight import activity


class RayAnswer(Answer[Any]):
    """Pending results of workers, and their combination."""

    def __init__(
        self,
        calls: Sequence[PendingCall],
        finish: Callable[[list[Any]], Any],
        what: str,
        whom: str,
        failures: Failures,
        balance: Callable[[], dict[str, float]],
    ) -> None:
        self._posts, self._finish, self._what, self._whom = list(calls), finish, what, whom
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
        """Block until all workers have answered."""
        with activity.waiting(self._what, on=[self._whom]):
            return self._finish(self._failures.answers(self._posts))


class RayGroup(WorkerGroup):
    """All workers of a role on Ray.

    Args:
        role, layout, balance, cost: as of :class:`~hone.cluster.group.WorkerGroup`.
        hosts: processes, by rank.
        pool: name of their pool.
        failures: explains failed calls.
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
        super().__init__(role, len(hosts), layout, balance=balance, cost=cost)
        self._hosts, self._pool, self._failures = list(hosts), pool, failures

    def _send(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        finish: Callable[[list[Any]], Any],
        balance: Callable[[], dict[str, float]],
    ) -> RayAnswer:
        """Call a method on some workers."""
        pending = [
            PendingCall(f"{self._pool}[{rank}]", self._hosts[rank].call.remote(self.role.name, method, sent, named))
            for rank, (sent, named) in arguments.items()
        ]
        return RayAnswer(pending, finish, f"{self.role.name}.{method}", self._pool, self._failures, balance)
