"""Change of the number of replicas while the pool serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hone.generation.pool.replica import Replica, ReplicaState
from hone.generation.pool.supervision import Supervisor

PERIOD = 0.02
"""Seconds between two looks at replicas that leave."""


class Resizer:
    """Adds replicas to a pool, and removes those with the highest numbers.

    A new replica starts like one that restarts: in a thread, and it serves once it has the latest weights. A replica that
    leaves finishes its requests, without new ones, and takes part in weight syncs until then. It leaves only while one that
    stays can serve, so that replicas which do not start never stop the pool.
    """

    def __init__(self, replicas: list[Replica], supervisor: Supervisor, new: Callable[[int], Replica]) -> None:
        self._replicas, self._supervisor, self._new = replicas, supervisor, new
        self.count = len(replicas)  # wanted number of replicas
        self._removing: asyncio.Task[None] | None = None

    def resize(self, count: int) -> None:
        """Have ``count`` replicas from now on; those that were given up are started again."""
        self.count = count
        for replica in self._replicas[:count]:
            if replica.state is ReplicaState.LOST:
                replica.state = ReplicaState.STARTING
        self._replicas += [self._new(index) for index in range(len(self._replicas), count)]
        self.attend()

    def attend(self) -> None:
        """Start and remove replicas on the current event loop."""
        self._mark()
        loop = asyncio.get_running_loop()
        ended = self._removing is None or self._removing.done() or self._removing.get_loop() is not loop
        if ended and len(self._replicas) > self.count:
            self._removing = self._supervisor.spawn(self._remove_surplus())

    def _mark(self) -> None:
        """Decide which replicas leave; start those that stay and have no engine."""
        can_serve = (ReplicaState.SERVING, ReplicaState.FENCED)
        replaced = any(replica.state in can_serve for replica in self._replicas[: self.count])
        for replica in self._replicas:
            replica.leaving = replaced and replica.index >= self.count
            if replica.state is ReplicaState.STARTING and not replica.leaving:
                self._supervisor.restart(replica)

    async def _remove_surplus(self) -> None:
        while len(self._replicas) > self.count:
            self._mark()
            last = self._replicas[-1]
            is_busy = last.under_way or last.state is ReplicaState.FENCED or self._supervisor.is_restarting(last)
            if last.leaving and not is_busy:
                last.state = ReplicaState.CLOSING
                await self._supervisor.end(last)
                if len(self._replicas) > self.count:
                    self._supervisor.forget(self._replicas.pop())
                else:  # it was wanted again meanwhile
                    last.state = ReplicaState.STARTING
                    self._mark()
            else:
                await asyncio.sleep(PERIOD)
