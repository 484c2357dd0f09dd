"""Which roles may have devices of their own, and that one process is enough; cheap to import, for checks before a run."""

from __future__ import annotations

from hone.config.ray import OwnPoolConfig
from hone.config.tree import RLConfig
from hone.errors import ConfigError


def pool_keys(config: RLConfig) -> dict[str, OwnPoolConfig]:
    """The keys of every role that may have a pool of its own."""
    return {
        "rollout": config.actor_rollout_ref.rollout,
        "reference": config.actor_rollout_ref.ref,
        "critic": config.critic,
        "reward_model": config.reward.reward_model,
    }


def check_local(config: RLConfig) -> None:
    """Make sure that one process is enough for what is asked.

    Raises:
        ConfigError: more processes than one, or pools of their own, without Ray.
    """
    processes = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if processes > 1:
        raise ConfigError(
            f"trainer.runtime=local is one process, asked for are {processes} "
            f"(nnodes={config.trainer.nnodes} x n_gpus_per_node={config.trainer.n_gpus_per_node})",
            why="the others would do nothing",
            fix="trainer.runtime=ray, or trainer.nnodes=1 trainer.n_gpus_per_node=1",
            where="trainer.runtime",
            code="R02",
        )
    apart = [name for name, keys in pool_keys(config).items() if keys.enable_resource_pool]
    if apart:
        raise ConfigError(
            f"trainer.runtime=local has one process, and {' and '.join(apart)} should have devices of their own",
            why="the key would change nothing",
            fix="trainer.runtime=ray, or enable_resource_pool=false",
            where="trainer.runtime",
            code="R02",
        )
