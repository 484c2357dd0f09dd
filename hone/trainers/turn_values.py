"""The stage that values turns by forks, for ``algorithm.adv_estimator=turn_value_by_forks``."""

from __future__ import annotations

from typing import Any

from hone.cluster.any_batch import AnyBatch
from hone.errors import ConfigError


def check_forks(trainer: Any) -> None:
    """Check that the engines are awake when turns are forked.

    Raises:
        ConfigError: they free their memory before.
    """
    if "turn_values" in trainer.estimator.needs and trainer.weight_sync.sleeps:
        raise ConfigError(
            "the engines free their memory before turns are forked",
            why=f"adv_estimator={trainer.config.algorithm.adv_estimator} continues episodes after their log-probs are known",
            fix="actor_rollout_ref.rollout.free_cache_engine=false",
            where="actor_rollout_ref.rollout.free_cache_engine",
        )


async def fork_turns(trainer: Any, batch: AnyBatch) -> AnyBatch:
    """Add the column ``turn_values``: for each row, the mean reward of continuations from the forked turns of its episode.

    Args:
        trainer: the :class:`~hone.trainers.rl.RLTrainer` that trains on the batch.
        batch: scored, with entropies.
    """
    config, ops = trainer.config, trainer.batch_ops
    points = await ops.fork_points(batch, trainer.step)
    rewards: dict[str, list[float]] = {}
    if points:
        seeding, samples = (config.trainer.seed, "forks", trainer.step), config.algorithm.forks.samples
        played = await trainer.episodes.rollout.play_forks(points, trainer.sampling, n=samples, seeding=seeding)
        rewards = await ops.fork_rewards(await trainer.episodes.score(played))
        trainer.metrics.add("forks/no_verdict_rate", 1 - sum(map(len, rewards.values())) / (samples * len(points)))
        trainer.metrics.add("forks/continued_tokens", await ops.sampled_tokens(played))
    trainer.metrics.add("forks/turns", len(points))
    return batch.updated(await ops.turn_values(batch, points, rewards))
