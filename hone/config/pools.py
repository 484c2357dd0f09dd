"""Pools of devices: which roles share them, what engines take of them, and whether the sizes fit. It does not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from hone.config.engines import SERVED
from hone.config.parallel import Layout, ParallelConfig
from hone.config.run import OwnPoolConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.errors import ConfigError
from hone.threads import divided

MAIN_POOL = "main"  # name of the pool of the actor, and of every role without a pool of its own

POOL_BLOCKS = {
    "rollout": "actor_rollout_ref.rollout",
    "reference": "actor_rollout_ref.ref",
    "critic": "critic",
    "reward_model": "reward.reward_model",
    "teacher": "distillation",
}
"""Roles that may have a separate pool, with the configuration block of its sizes."""


@dataclass(frozen=True)
class Pool:
    """Devices and the roles that share them: one process per device holds all of these roles."""

    name: str  # main, or the name of the only role of the pool
    block: str  # configuration block with the sizes of the pool
    nodes: int
    per_node: int  # processes per node
    roles: tuple[str, ...]  # names of the roles, in order of creation
    replicated: bool  # whether every process holds whole models
    parallel: ParallelConfig  # parallel sizes of a sharded model

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def divided(self) -> bool:
        return self.world > 1 and not self.replicated

    @cached_property
    def layout(self) -> Layout:
        """Layout of a model over the processes. Raises ConfigError: the parallel sizes do not divide the processes."""
        if self.replicated:
            return Layout(self.world, dp_shard=self.world)
        return Layout.plan(self.world, self.parallel)


def own_pools(config: AnyConfig) -> dict[str, OwnPoolConfig]:
    """Return the pool settings of every role with a separate pool, whether or not the run has the role."""
    if not isinstance(config, RLConfig):
        return {}
    shared = config.actor_rollout_ref
    blocks = (shared.rollout, shared.ref, config.critic, config.reward.reward_model, config.distillation)
    return {role: keys for role, keys in zip(POOL_BLOCKS, blocks, strict=True) if keys.enable_resource_pool}


def engine_devices(config: RLConfig) -> int:
    """Return the number of workers whose devices one engine takes; 1 if each worker has engines of its own."""
    rollout = config.actor_rollout_ref.rollout
    starts_servers = rollout.name in SERVED and rollout.engine_url is None
    return rollout.devices_per_engine if starts_servers and config.trainer.runtime == "ray" else 1


def check_layouts(pools: Iterable[Pool]) -> None:
    """Raise ConfigError unless the parallel sizes divide the processes of every pool."""
    for pool in pools:
        _ = pool.layout


def check_engines(config: AnyConfig) -> None:
    """Raise ConfigError unless the rollout workers of every node divide into whole engines; an offline run has none."""
    if not isinstance(config, RLConfig):
        return
    rollout, size = config.actor_rollout_ref.rollout, engine_devices(config)
    block, sizes_of_pool = (
        ("actor_rollout_ref.rollout", rollout) if rollout.enable_resource_pool else ("trainer", config.trainer)
    )
    workers = sizes_of_pool.n_gpus_per_node
    if workers % size:
        sizes = [str(number) for number in range(1, workers + 1) if workers % number == 0]
        raise ConfigError(
            f"an engine of {rollout.tensor_model_parallel_size} tensor x {rollout.data_parallel_size} data parallel devices "
            f"does not divide the {workers} rollout workers of a node",
            why="an engine takes the devices of whole workers on one node, and every worker belongs to one engine",
            fix=f"actor_rollout_ref.rollout.tensor_model_parallel_size=<one of {', '.join(sizes)}>, or "
            f"{block}.n_gpus_per_node=<a multiple of {size}>",
            where="actor_rollout_ref.rollout.tensor_model_parallel_size",
            code="R79",
        )


def check_local(config: AnyConfig) -> None:
    """Check that the local runtime's single process is enough.

    Raises ConfigError: several processes, or a role with a separate pool, without Ray.
    """
    processes = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if processes > 1:
        raise ConfigError(
            f"trainer.runtime=local is 1 process, but the configuration needs {processes} "
            f"(nnodes={config.trainer.nnodes} x n_gpus_per_node={config.trainer.n_gpus_per_node})",
            why="the other processes would not exist",
            fix="trainer.runtime=ray, or trainer.nnodes=1 trainer.n_gpus_per_node=1",
            where="trainer.runtime",
            code="R02",
        )
    separate = list(own_pools(config))
    if separate:
        raise ConfigError(
            f"trainer.runtime=local is 1 process, but enable_resource_pool=true for {' and '.join(separate)} needs more",
            why="the key would have no effect",
            fix="trainer.runtime=ray, or enable_resource_pool=false",
            where="trainer.runtime",
            code="R02",
        )


def divided_cores(config: RLConfig, count: int | None = None) -> tuple[int, int]:
    """Return the CPU threads of each of ``count`` replicas, and those of training in the same run.

    Args:
        config: configuration of the run.
        count: number of replicas; None means that of the configuration.
    """
    count = count or config.actor_rollout_ref.rollout.num_replicas or 1
    keys = config.trainer
    return divided(len(os.sched_getaffinity(0)), count, keys.async_training.engine_threads, keys.num_threads)
