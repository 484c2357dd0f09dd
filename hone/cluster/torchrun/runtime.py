"""Roles of a launched run: every rank builds them, and computes its rows of each call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hone.cluster.columns import assembled, stored
from hone.cluster.context import RoleSpec, WorkerContext, prepare_torch
from hone.cluster.dispatch import Collect, dispatched
from hone.cluster.group import Arguments, WorkerGroup, WorkerRuntime
from hone.cluster.local import LocalAnswer
from hone.cluster.plan import place
from hone.cluster.remote_batch import Shard
from hone.cluster.torchrun.exchange import Ranks, joined_ranks
from hone.cluster.torchrun.ranks import POOL, check_launched
from hone.config.parallel import Layout
from hone.config.pools import check_layouts
from hone.config.trees import AnyConfig
from hone.data.balance import CostModel
from hone.data.batch import Batch
from hone.insight import activity
from hone.models.kernels.cpu.memory import MemoryUse
from hone.training.layout import build_meshes, join_ranks


class RankAnswer(LocalAnswer):
    """Result of a call on all ranks, with the metrics of the division."""

    def __init__(self, value: Any, balance: Callable[[], dict[str, float]]) -> None:
        super().__init__(value)
        self.balance = balance


class TorchrunGroup(WorkerGroup):
    """All workers of a role, seen from one of the ranks.

    Args:
        role, layout, balance, cost: as of :class:`~hone.cluster.group.WorkerGroup`.
        worker: this rank's worker.
        ranks: exchange with the others.
    """

    def __init__(
        self, role: RoleSpec, layout: Layout, worker: Any, ranks: Ranks, *, balance: bool, cost: CostModel
    ) -> None:
        super().__init__(role, ranks.launched.world, layout, balance=balance, cost=cost)
        self._worker, self._ranks = worker, ranks

    def _send(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        finish: Callable[[list[Any]], Any],
        balance: Callable[[], dict[str, float]],
    ) -> RankAnswer:
        """Call this rank's worker, if it is among those called, and exchange results where they are combined."""
        spec, rank = dispatched(self.role.cls)[method], self._ranks.launched.rank
        local = spec.collect is Collect.FIRST and len(arguments) == self._ranks.launched.world

        def call() -> Any:
            if rank not in arguments:
                return None
            args, kwargs = arguments[rank]
            sent = [assembled(argument, list) if isinstance(argument, Shard) else argument for argument in args]
            with activity.doing(f"{self.role.name}.{method}"):
                return getattr(self._worker, method)(*sent, **kwargs)

        values = self._ranks.together(call, gather=not local, aside=spec.background)
        called = [values[rank] for rank in arguments]
        kept = [stored(value, _itself) if isinstance(value, Batch) else value for value in called]
        return RankAnswer(finish(kept), balance)


class TorchrunRuntime(WorkerRuntime):
    """Roles on the ranks of a launcher.

    Args:
        resume: location of the checkpoint to resume from, or None.

    Raises:
        ConfigError: this process was not launched, the sizes differ from the launcher's, or an indivisible layout.
        HoneError: errors of the roles' constructors.
    """

    def __init__(
        self, config: AnyConfig, roles: Sequence[RoleSpec], *, total_steps: int = 1, resume: str | None = None
    ) -> None:
        super().__init__(config, _itself, list)
        launched = check_launched(config)
        (pool,) = pools = place(config, roles)
        check_layouts(pools)
        self._layout, self._ranks = pool.layout, joined_ranks()
        if torch.cuda.is_available() and config.trainer.device != "cpu":
            torch.cuda.set_device(launched.local_rank)
        threads = max(1, len(os.sched_getaffinity(0)) // launched.local_world)
        device, meshes = prepare_torch(config.trainer, threads=threads), None
        if launched.world > 1:
            join_ranks(device, self._ranks.store, launched.rank, launched.world)
            meshes = build_meshes(pool.layout, device.type)
        self._memory = MemoryUse()
        self.context: WorkerContext[Any] = WorkerContext(
            config,
            device,
            launched.rank,
            pool.layout,
            meshes,
            world=launched.world,
            total_steps=total_steps,
            resume=resume,
        )
        for role in roles:
            self.add(role)

    def add(self, role: RoleSpec) -> TorchrunGroup:
        """Build another role on every rank."""

        def build() -> Any:
            with activity.doing(f"building {role.name}"):
                return role.cls(self.context, **role.arguments)

        worker = self._ranks.together(build, gather=False)[0]
        self.context.roles[role.name] = worker
        self._groups[role.name] = TorchrunGroup(role, self._layout, worker, self._ranks, **self._division)
        return self._groups[role.name]

    def begin_step(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def memory(self) -> dict[str, dict[str, float]]:
        """Return the memory of every rank, by ``pool[rank]``."""
        return {f"{POOL}[{rank}]": value for rank, value in enumerate(self._ranks.together(self._memory))}

    def close(self) -> None:
        """Release the roles, and disconnect from the other ranks."""
        self._groups.clear()
        self.context.roles.clear()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._ranks.close()


def _itself(columns: Any) -> Any:
    """Every rank has all columns."""
    return columns
