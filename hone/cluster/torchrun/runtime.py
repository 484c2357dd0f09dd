"""Rank 0 of a launched run: the roles of all ranks as groups."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from hone.cluster.any_batch import AnyBatch
from hone.cluster.columns import assembled, stored
from hone.cluster.context import RoleSpec
from hone.cluster.dispatch import Answer
from hone.cluster.failures import is_broken_collective, worker_lost
from hone.cluster.group import Arguments, WorkerGroup, stored_batch
from hone.cluster.plan import place
from hone.cluster.remote_batch import RemoteBatch
from hone.cluster.torchrun.channel import AskingEnd
from hone.cluster.torchrun.ranks import check_launched
from hone.cluster.torchrun.worker import POOL, RankWorker
from hone.config.parallel_layout import Layout
from hone.config.pools import check_layouts
from hone.config.trees import AnyConfig, model_block
from hone.data.balance import CostModel
from hone.data.batch import Batch
from hone.errors import HoneError
from hone.insight import activity

log = logging.getLogger("hone")

GRACE = 10.0
"""Seconds that other ranks have to report the cause of a broken collective."""


class RankAnswer(Answer):
    """Answers of ranks, some of them to come, and their combination."""

    def __init__(
        self,
        answers: Mapping[int, Future[Any]],
        finish: Callable[[list[Any]], Any],
        what: str,
        balance: Callable[[], dict[str, float]],
    ) -> None:
        self._answers, self._finish, self._what, self.balance = answers, finish, what, balance

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()

    def result(self) -> Any:
        """Block until all ranks have answered."""
        with activity.waiting(self._what, on=[POOL]):
            return self._finish(values_of(self._answers))


class TorchrunGroup(WorkerGroup):
    """All workers of a role on the ranks of a launcher.

    Args:
        role, layout, balance, cost: as of :class:`~hone.cluster.group.WorkerGroup`.
        send: sends a call to a rank and returns its answer to come.
    """

    def __init__(
        self,
        role: RoleSpec,
        world: int,
        layout: Layout,
        send: Callable[..., dict[int, Future[Any]]],
        *,
        balance: bool,
        cost: CostModel,
    ) -> None:
        super().__init__(role, world, layout, balance=balance, cost=cost)
        self._send_calls = send

    def _send(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        finish: Callable[[list[Any]], Any],
        balance: Callable[[], dict[str, float]],
    ) -> RankAnswer:
        """Call a method on some workers; rank 0 computes its share before this returns."""
        calls = {rank: (self.role.name, method, sent, named) for rank, (sent, named) in arguments.items()}
        return RankAnswer(self._send_calls("call", calls), finish, f"{self.role.name}.{method}", balance)


class TorchrunRuntime:
    """Roles on the ranks of a launcher.

    Args:
        config: configuration of the run.
        roles: roles to build, in this order on every rank.
        total_steps: horizon of the schedules.
        resume: location of the checkpoint to resume from, or None.

    Raises:
        ConfigError: this process was not launched, the sizes differ from the launcher's, or an indivisible layout.
        HoneError: errors of the roles' constructors.
    """

    def __init__(
        self, config: AnyConfig, roles: Sequence[RoleSpec], *, total_steps: int = 1, resume: str | None = None
    ) -> None:
        launched = check_launched(config)
        (pool,) = pools = place(config, roles)
        check_layouts(pools)
        self._config, self._run = config, Path(config.trainer.default_local_dir).absolute()
        self._layout, self._world = pool.layout, launched.world
        self._worker = RankWorker(launched)
        self._others = AskingEnd(launched, self._lost)
        self._groups: dict[str, TorchrunGroup] = {}
        try:
            for rank in self._others.ranks:
                self._others.tell(rank, str(self._run))
            meeting = f"{launched.address}:{free_port()}"
            self._all("begin", config, self._layout, meeting, total_steps, resume)
            for role in roles:
                self.add(role)
        except BaseException:
            self.close()
            raise

    def add(self, role: RoleSpec) -> TorchrunGroup:
        """Build another role on every rank."""
        self._all("build", role)
        cost = CostModel.from_directory(model_block(self._config)[1].path)
        balance = self._config.trainer.balance_batch
        self._groups[role.name] = TorchrunGroup(role, self._world, self._layout, self._ask, balance=balance, cost=cost)
        return self._groups[role.name]

    def group(self, name: str) -> TorchrunGroup:
        """Return the workers of a role."""
        return self._groups[name]

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def put(self, batch: Batch) -> RemoteBatch:
        """Return the batch with its columns ready to be sent."""
        return stored_batch([stored(batch, lambda columns: columns)])

    def fetch(self, batch: AnyBatch) -> Batch:
        """Return the columns, which the workers have sent already."""
        assert isinstance(batch, RemoteBatch)
        (shard,) = batch.shards([np.arange(len(batch))], objects=True)
        return assembled(shard, list)

    def begin_step(self, seed: int) -> None:
        """Seed torch on every rank."""
        self._all("begin_step", seed)

    def memory(self) -> dict[str, dict[str, float]]:
        """Return the memory of every rank, by ``pool[rank]``."""
        return {f"{POOL}[{rank}]": value for rank, value in enumerate(self._all("memory"))}

    def close(self) -> None:
        """End the other ranks."""
        self._groups.clear()
        self._others.close()

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank's worker; return the results in the order of ranks."""
        return values_of(self._ask(name, dict.fromkeys(range(self._world), arguments)))

    def _ask(self, name: str, calls: Mapping[int, Sequence[Any]]) -> dict[int, Future[Any]]:
        """Call a method of some ranks' workers, of this one last."""
        answers = {rank: self._others.ask(rank, name, *arguments) for rank, arguments in calls.items() if rank}
        if 0 in calls:
            here: Future[Any] = Future()
            try:
                here.set_result(getattr(self._worker, name)(*calls[0]))
            except Exception as error:  # noqa: BLE001 - raised with the answers of the other ranks
                here.set_exception(error)
            answers[0] = here
        return {rank: answers[rank] for rank in calls}

    def _lost(self, rank: int) -> BaseException:
        """Return the error for a rank that is gone."""
        name = f"{POOL}[{rank}]"
        records = {record.name: record for record in activity.read_records(self._run / activity.FOLDER)}
        return worker_lost(name, records.get(name), "is gone", config=self._config)


def values_of(answers: Mapping[int, Future[Any]]) -> list[Any]:
    """Return the results of all ranks.

    Raises:
        BaseException: the error of a rank: a user's mistake first, and last those that follow from another rank's end.
    """
    errors: dict[int, BaseException] = {}
    deadline: float | None = None
    for rank, answer in sorted(answers.items()):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            error = answer.exception(left)
        except TimeoutError:
            continue
        if error is not None:
            errors[rank] = error
            deadline = deadline or time.monotonic() + GRACE
    if errors:
        raise min(errors.values(), key=_precedence)
    return [answer.result() for answer in answers.values()]


def _precedence(error: BaseException) -> int:
    return 2 if is_broken_collective(error) else 0 if isinstance(error, HoneError) else 1


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
