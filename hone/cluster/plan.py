"""Roles of a run with their classes, placed on its pools of devices."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Sequence

from hone.cluster.context import RoleSpec
from hone.config.derived import RunSpec
from hone.config.pools import MAIN_POOL, Pool, engine_devices
from hone.config.specs import OfflineSpec, spec_of
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, OfflineConfig

_CLASSES = {
    "actor": "hone.cluster.roles:PolicyWorker",
    "rollout": "hone.cluster.rollout:RolloutWorker",
    "reference": "hone.cluster.roles:ReferenceWorker",
    "critic": "hone.cluster.roles:CriticWorker",
    "reward_model": "hone.cluster.reward_model:RewardModelWorker",
    "generative reward_model": "hone.cluster.reward_model:GenerativeRewardModelWorker",
    "served reward_model": "hone.cluster.reward_model:ServedRewardModelWorker",
    "process critic": "hone.cluster.roles:ProcessRewardWorker",
    "teacher": "hone.cluster.teacher:TeacherWorker",
    "offline actor": "hone.cluster.offline_roles:LearnerWorker",
    "offline reference": "hone.cluster.offline_roles:FrozenPolicyWorker",
    "offline teacher": "hone.cluster.teacher:TeacherWorker",
}
"""Class of each role by path: the driver knows only its handle, and imports none of this before the run is built."""


def model_roles(config: RLConfig) -> list[RoleSpec]:
    """Return the roles with a model that the algorithm needs, in the order of their construction."""
    roles = []
    for role in RunSpec(config).roles:
        name, engines = role.name, {"rollout": config, "reward_model": RunSpec(config).judge}.get(role.name)
        if name == "reward_model" and engines is not None:
            name = f"{'generative' if config.reward.reward_model.kind == 'generative' else 'served'} {name}"
        if name == "critic" and RunSpec(config).rewards_process:
            name = "process critic"
        group = engine_devices(engines) if engines is not None else 1
        roles.append(RoleSpec(role.name, _class_of(name), replicated=role.replicated, group=group))
    return roles


def offline_roles(config: OfflineConfig) -> list[RoleSpec]:
    """Return the roles of a run over a fixed dataset, in the order of their construction."""
    return [RoleSpec(role.name, _class_of(f"offline {role.name}")) for role in OfflineSpec(config).roles]


def _class_of(role: str) -> type:
    return pkgutil.resolve_name(_CLASSES[role])


def place(config: AnyConfig, roles: Sequence[RoleSpec]) -> list[Pool]:
    """Return the pools with the names of all these roles; a role without a pool is in the main pool."""
    pools = spec_of(config).pools
    owners = {name: pool.name for pool in pools for name in pool.roles}
    placed = []
    for pool in pools:
        pool_roles = [role for role in roles if owners.get(role.name, MAIN_POOL) == pool.name]
        names, replicated = tuple(role.name for role in pool_roles), all(role.replicated for role in pool_roles)
        placed.append(dataclasses.replace(pool, roles=names, replicated=replicated))
    return placed
