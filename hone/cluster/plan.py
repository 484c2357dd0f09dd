"""Roles of a run with their classes, placed on its pools of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hone.cluster.context import RoleSpec
from hone.cluster.generative_reward_model import GenerativeRewardModelWorker
from hone.cluster.offline_roles import FrozenPolicyWorker, LearnerWorker
from hone.cluster.reward_model import RewardModelWorker
from hone.cluster.roles import CriticWorker, PolicyWorker, ReferenceWorker
from hone.cluster.rollout import RolloutWorker
from hone.cluster.teacher import TeacherWorker
from hone.config.derived import RunSpec
from hone.config.pools import MAIN_POOL, Pool, engine_devices
from hone.config.specs import OfflineSpec, spec_of
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, OfflineConfig

_CLASSES: dict[str, type] = {
    "actor": PolicyWorker,
    "rollout": RolloutWorker,
    "reference": ReferenceWorker,
    "critic": CriticWorker,
    "reward_model": RewardModelWorker,
    "teacher": TeacherWorker,
}

_OFFLINE_CLASSES: dict[str, type] = {"actor": LearnerWorker, "reference": FrozenPolicyWorker, "teacher": TeacherWorker}


def model_roles(config: RLConfig) -> list[RoleSpec]:
    """Return the roles with a model that the algorithm needs, in the order of their construction."""
    roles = []
    for role in RunSpec(config).roles:
        cls = _CLASSES[role.name]
        if role.name == "reward_model" and config.reward.reward_model.kind == "generative":
            cls = GenerativeRewardModelWorker
        group = engine_devices(config) if role.name == "rollout" else 1
        roles.append(RoleSpec(role.name, cls, replicated=role.replicated, group=group))
    return roles


def offline_roles(config: OfflineConfig) -> list[RoleSpec]:
    """Return the roles of a run over a fixed dataset, in the order of their construction."""
    return [RoleSpec(role.name, _OFFLINE_CLASSES[role.name]) for role in OfflineSpec(config).roles]


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
