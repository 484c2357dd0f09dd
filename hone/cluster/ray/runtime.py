"""The Ray runtime: connects or starts a cluster, places one process a device, and makes the roles in them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hone.cluster.context import RoleSpec
from hone.cluster.plan import Pool, layout_of, pools_of
from hone.cluster.ray.connection import Connection, capacity, connect
from hone.cluster.ray.group import WorkerGroup, answers
from hone.cluster.ray.host import Place, WorkerHost, versions
from hone.config.run import RunConfig
from hone.config.tree import RLConfig
from hone.errors import ConfigError
from hone.training.layout import Layout

log = logging.getLogger("hone")

EVERY_ROLE = "all"
"""Stands for every role in ``ray.env_vars``."""


@dataclass
class PlacedPool:
    """A pool with its processes.

    Attributes:
        pool: what it should be.
        placement: the devices that Ray holds for it.
        hosts: handles of the processes, by rank.
        pids: their process ids.
    """

    pool: Pool
    placement: PlacementGroup
    hosts: list[Any]
    pids: list[int]


class RayRuntime:
    """Worker processes on a Ray cluster, one a device; roles of one pool share them.

    Attributes:
        pools: the placed pools by name.

    Args:
        config: of the run.
        roles: what to make, in this order in every process of the role's pool.
        total_steps: horizon of the schedules.
        resume: location of the checkpoint to go on from, or None.

    Raises:
        ConfigError: no cluster at the address, too few devices, other versions in the workers, a layout that does not divide.
        HoneError: what the roles raise when they are made.
    """

    def __init__(
        self, config: RLConfig, roles: Sequence[RoleSpec], *, total_steps: int = 1, resume: str | None = None
    ) -> None:
        self._config, self._total_steps, self._resume = config, total_steps, resume
        self.pools: dict[str, PlacedPool] = {}
        self._groups: dict[str, WorkerGroup] = {}
        pools = pools_of(config, list(roles))
        layouts = {pool.name: layout_of(config, pool.world) for pool in pools}
        self._device = "CPU" if config.trainer.device == "cpu" else "GPU"
        self._connection: Connection = connect(config.ray, workers=sum(pool.world for pool in pools))
        try:
            if self._device == "GPU" and config.trainer.device == "auto" and not capacity("GPU"):
                self._device = "CPU"
            self._check_devices(pools)
            for pool in pools:
                self.pools[pool.name] = self._start(pool)
            for placed in self.pools.values():
                self._begin(placed)
            for role in roles:
                self._build(role, next(pool for pool in pools if role in pool.roles), layouts)
        except BaseException:
            self.close()
            raise

    # what the program uses -------------------------------------------------------------------------------------------

    def group(self, name: str) -> WorkerGroup:
        """The workers of a role."""
        return self._groups[name]

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def add(self, role: RoleSpec) -> WorkerGroup:
        """Make one more role in the processes of the actor's pool."""
        main = next(iter(self.pools.values())).pool
        self._build(role, main, {main.name: layout_of(self._config, main.world)})
        return self.group(role.name)

    def begin_step(self, seed: int) -> None:
        """Seed torch in every process, and let the columns of the last step go."""
        answers([host.begin_step.remote(seed) for placed in self.pools.values() for host in placed.hosts])

    def memory(self) -> dict[str, float]:
        """Resident memory of every process in GiB, by ``pool[rank]``."""
        asked = {
            f"{name}[{rank}]": host.memory.remote()
            for name, placed in self.pools.items()
            for rank, host in enumerate(placed.hosts)
        }
        return dict(zip(asked, answers(list(asked.values())), strict=True))

    def close(self) -> None:
        """End the processes, and the cluster if it was started here."""
        for placed in self.pools.values():
            self._end(placed)
        self.pools.clear()
        self._groups.clear()
        self._connection.close()

    # starting --------------------------------------------------------------------------------------------------------

    def _check_devices(self, pools: Sequence[Pool]) -> None:
        asked = sum(pool.world for pool in pools) * self._config.ray.device_fraction
        present = capacity(self._device)
        if asked > present:
            shown = " + ".join(f"{pool.name} {pool.nodes} x {pool.per_node}" for pool in pools)
            share = self._config.ray.device_fraction
            raise ConfigError(
                f"the run asks for {asked:g} {self._device}s ({shown}, {share:g} each), the cluster has {present:g}",
                why="Ray would wait for devices that never come",
                fix="fewer workers (trainer.n_gpus_per_node, trainer.nnodes), or "
                + ("ray.num_cpus=<as many>" if self._device == "CPU" else f"ray.device_fraction={present / asked:.2g}"),
                where="trainer.n_gpus_per_node",
                code="R02",
            )

    def _start(self, pool: Pool) -> PlacedPool:
        """Reserve the devices and start the processes: a bundle a node, so that a node's processes are together."""
        share = self._config.ray.device_fraction
        bundle = {"CPU": pool.per_node * (share if self._device == "CPU" else 1.0)}
        if self._device == "GPU":
            bundle["GPU"] = pool.per_node * share
        strategy = "STRICT_PACK" if pool.nodes == 1 else "STRICT_SPREAD"
        placement = placement_group([bundle] * pool.nodes, strategy=strategy)
        if not placement.wait(self._config.ray.start_timeout):
            remove_placement_group(placement)
            free = ", ".join(f"{n['NodeManagerAddress']}: {n['Resources'].get(self._device, 0):g}" for n in ray.nodes())
            raise ConfigError(
                f"no place for pool '{pool.name}' ({pool.nodes} nodes x {bundle}) within "
                f"{self._config.ray.start_timeout:g} s; {self._device}s by node: {free}",
                why="nothing can start before every worker has its device",
                fix="fewer workers a node, another runs on the cluster: wait for it, or a larger ray.start_timeout",
                where="trainer.nnodes",
                code="R02",
            )
        threads = self._threads(pool)
        options = {"num_cpus": share if self._device == "CPU" else 1, "max_concurrency": 64}
        if self._device == "GPU":
            options["num_gpus"] = share
        hosts = [
            ray.remote(WorkerHost)
            .options(
                **options,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, rank // pool.per_node),
                runtime_env=self._environment(pool, threads),
            )
            .remote()
            for rank in range(pool.world)
        ]
        return PlacedPool(pool, placement, hosts, [])

    def _threads(self, pool: Pool) -> int:
        """CPU threads of each process of a pool."""
        cores = len(os.sched_getaffinity(0))
        return self._config.trainer.num_threads or max(1, cores // pool.per_node)

    def _environment(self, pool: Pool, threads: int) -> dict[str, Any]:
        """Ray's runtime environment of a pool's processes."""
        config = self._config.ray
        given = {**config.env_vars.get(EVERY_ROLE, {})}
        for role in pool.roles:
            given |= config.env_vars.get(role.name, {})
        own = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        merged = own | config.runtime_env.get("env_vars", {}) | given
        return {**config.runtime_env, "env_vars": {name: str(value) for name, value in merged.items()}}

    def _begin(self, placed: PlacedPool) -> None:
        pool, here = placed.pool, versions()
        facts = answers([host.facts.remote() for host in placed.hosts], self._config.ray.start_timeout)
        for rank, (there, _) in enumerate(facts):
            check_versions(here, there, f"{pool.name}[{rank}]")
        run: RunConfig = self._config.trainer
        places = [
            Place(
                pool=pool.name,
                rank=rank,
                world=pool.world,
                meeting=facts[0][1],
                threads=self._threads(pool),
                directory=str(Path.cwd()),
                modules=[entry for entry in sys.path if entry] + [str(Path.cwd())],
                run=str(Path(run.default_local_dir).absolute()),
            )
            for rank in range(pool.world)
        ]
        begun = [
            host.begin.remote(place, self._config, self._total_steps, self._resume)
            for host, place in zip(placed.hosts, places, strict=True)
        ]
        placed.pids = answers(begun, self._config.ray.start_timeout)

    def _build(self, role: RoleSpec, pool: Pool, layouts: dict[str, Layout]) -> None:
        hosts = self.pools[pool.name].hosts
        answers([host.build.remote(role) for host in hosts], None)
        self._groups[role.name] = WorkerGroup(
            role, hosts, pool.name, layouts[pool.name], balance=self._config.trainer.balance_batch
        )

    def _end(self, placed: PlacedPool) -> None:
        """End a pool's processes in good order; what does not answer is killed."""
        ended = [host.end.remote() for host in placed.hosts]
        _, late = ray.wait(ended, num_returns=len(ended), timeout=10)
        if late:
            log.warning("%d workers of pool '%s' did not end in good order", len(late), placed.pool.name)
        for host in placed.hosts:
            ray.kill(host)
        remove_placement_group(placed.placement)


def check_versions(here: dict[str, str], there: dict[str, str], where: str) -> None:
    """Make sure that a worker has the packages that the driver has.

    Raises:
        ConfigError: a version differs.
    """
    differing = [name for name in here if here[name] != there.get(name)]
    if differing:
        shown = ", ".join(f"{name} {there.get(name, 'none')} (the driver has {here[name]})" for name in differing)
        raise ConfigError(
            f"worker {where} has {shown}",
            why="what one process sends the other may not read, or read as something else",
            fix="install the same environment on every node, or name it in ray.runtime_env",
            where="ray.runtime_env",
            code="E-versions",
        )
