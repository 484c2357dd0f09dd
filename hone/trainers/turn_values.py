"""The values of turns by forks, for ``algorithm.adv_estimator=turn_value_by_forks``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.cluster.any_batch import AnyBatch
from hone.config.tree import RLConfig
from hone.errors import ConfigError
from hone.generation.protocol import SamplingParams
from hone.trainers.episodes import Episodes
from hone.trainers.stages import StepState

if TYPE_CHECKING:
    from hone.agents.forking import ForkPoint


class TurnForks:
    """Continues recorded episodes from some of their turns, to value these.

    Args:
        engines_sleep: whether the engines free their memory before the log-probs are known.

    Raises:
        ConfigError: they do, so none could continue an episode.
    """

    def __init__(self, config: RLConfig, episodes: Episodes, sampling: SamplingParams, *, engines_sleep: bool) -> None:
        if engines_sleep:
            raise ConfigError(
                "the engines free their memory before turns are forked",
                why=f"adv_estimator={config.algorithm.adv_estimator} continues episodes after their log-probs are known",
                fix="actor_rollout_ref.rollout.free_cache_engine=false",
                where="actor_rollout_ref.rollout.free_cache_engine",
            )
        self._samples, self._seed = config.algorithm.forks.samples, config.trainer.seed
        self._episodes, self._sampling = episodes, sampling

    async def add_values(self, state: StepState) -> StepState:
        """Add the column ``turn_values``: for each row, the mean reward of continuations from the forked turns of its episode.

        The batch is scored, and has entropies.
        """
        work, samples = self._episodes.work, self._samples
        points = await work.fork_points(state.batch, state.step)
        rewards: dict[str, list[float]] = {}
        if points:
            played = await self._play(points, state.step)
            rewards = await work.fork_rewards(await self._episodes.score(played))
            state.metrics.add("forks/no_verdict_rate", 1 - sum(map(len, rewards.values())) / (samples * len(points)))
            state.metrics.add("forks/continued_tokens", await work.sampled_tokens(played))
        state.metrics.add("forks/turns", len(points))
        return state.add(await work.turn_values(state.batch, points, rewards))

    async def _play(self, points: list[ForkPoint], step: int) -> AnyBatch:
        seeding = (self._seed, "forks", step)
        return await self._episodes.rollout.play_forks(points, self._sampling, n=self._samples, seeding=seeding)
