"""What a run consists of: the roles that its algorithm needs, and the pools of devices that they live in."""

from __future__ import annotations

from dataclasses import dataclass

from hone.algorithms import advantage_estimators, preference_losses
from hone.cluster.context import RoleSpec
from hone.cluster.generative_reward_model import GenerativeRewardModelWorker
from hone.cluster.pool_keys import pool_keys
from hone.cluster.reward_model import RewardModelWorker
from hone.cluster.roles import CriticWorker, PolicyWorker, ReferenceWorker
from hone.cluster.rollout import RolloutWorker
from hone.config.tree import RLConfig
from hone.training.layout import Layout

MAIN = "main"
"""The pool of the actor, and of every role that has none of its own."""


@dataclass(frozen=True)
class Pool:
    """Devices, and the roles that share them: one process a device, which holds all of these roles.

    Attributes:
        name: of the pool.
        nodes: how many nodes it spans.
        per_node: processes on each.
        roles: in the order in which they are made.
    """

    name: str
    nodes: int
    per_node: int
    roles: tuple[RoleSpec, ...]

    @property
    def world(self) -> int:
        """Processes."""
        return self.nodes * self.per_node

    @property
    def shares_models(self) -> bool:
        """Whether its processes hold parts of a model together; otherwise each answers for its rows alone."""
        return self.world > 1 and not all(role.whole for role in self.roles)

    def layout(self, config: RLConfig) -> Layout:
        """How its processes share a model.

        Raises:
            ConfigError: the sizes do not divide.
        """
        if all(role.whole for role in self.roles):
            return Layout(self.world, dp_shard=self.world)
        return Layout.plan(self.world, config.actor_rollout_ref.actor)


def model_roles(config: RLConfig) -> list[RoleSpec]:
    """The roles with a model that the algorithm needs, in the order in which they are made."""
    roles = [RoleSpec("actor", PolicyWorker), RoleSpec("rollout", RolloutWorker, whole=True)]
    if needs_reference(config):
        roles.append(RoleSpec("reference", ReferenceWorker))
    if needs_critic(config):
        roles.append(RoleSpec("critic", CriticWorker))
    if config.reward.reward_model.enable:
        generative = config.reward.reward_model.kind == "generative"
        judge = GenerativeRewardModelWorker if generative else RewardModelWorker
        roles.append(RoleSpec("reward_model", judge, whole=True))
    return roles


def pools_of(config: RLConfig, roles: list[RoleSpec]) -> list[Pool]:
    """Put every role into its pool; the actor's comes first."""
    own = {name: keys for name, keys in pool_keys(config).items() if keys.enable_resource_pool}
    shared = tuple(role for role in roles if role.name not in own)
    pools = [Pool(MAIN, config.trainer.nnodes, config.trainer.n_gpus_per_node, shared)]
    for role in roles:
        if role.name in own:
            pools.append(Pool(role.name, own[role.name].nnodes, own[role.name].n_gpus_per_node, (role,)))
    return pools


def needs_reference(config: RLConfig) -> bool:
    """Whether a KL term is on, or a preference loss compares with the reference."""
    actor = config.actor_rollout_ref.actor
    pairs = actor.preference_loss.loss_mode
    by_pairs = pairs is not None and "reference" in preference_losses.get(pairs).needs
    return config.algorithm.use_kl_in_reward or actor.use_kl_loss or by_pairs


def needs_critic(config: RLConfig) -> bool:
    """critic.enable, or when null whether the estimator needs values."""
    if config.critic.enable is not None:
        return config.critic.enable
    return "values" in advantage_estimators.get(config.algorithm.adv_estimator).needs
