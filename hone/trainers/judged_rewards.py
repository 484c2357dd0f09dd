"""Rewards of a reward model, alone or together with those of the reward function."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping, Sequence

from hone.config.reward import RewardConfig
from hone.data.types import Trajectory
from hone.errors import RewardError
from hone.rewards.manager import RewardManager
from hone.rewards.score import Score
from hone.rewards.scorers import scorer_for

log = logging.getLogger(__name__)


class JudgedRewards(RewardManager):
    """The rewards of a run: of the reward function or the built-in scorers, and where a reward model is used
    (``reward.reward_model``), of that, alone or added.

    Terms of a score with a reward model: ``rm``, the model's score as it is; ``rule``, what the reward function or the built-in
    scorer says, where there is one; and the terms of that.

    Args:
        config: the block ``reward``.
    """

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(config)
        self.settings, self.with_rules = config.reward_model, True

    def check(self, data_sources: Mapping[str, int], self_scored: Collection[str] = ()) -> None:
        """Make sure that every kind of problem can be scored; with ``combine=replace`` the model alone can do it.

        Raises:
            RewardError: with ``combine=add`` a data source has no scorer, or a scorer's package is missing.
        """
        unknown = [
            source
            for source in data_sources
            if not self._named and source not in self_scored and scorer_for(source) is None
        ]
        if self.settings.enable and self.settings.combine == "replace" and unknown:
            self.with_rules = False
            log.info("no scorer knows data_source %s: the reward model alone scores", ", ".join(sorted(unknown)))
        else:
            super().check(data_sources, self_scored)

    async def score(
        self, trajectories: Sequence[Trajectory], judged: Sequence[float] | None = None, *, training: bool = False
    ) -> list[Score]:
        """Score each trajectory; scores come back in the same order.

        Args:
            trajectories: what was played.
            judged: the reward model's score of each; None where there is no reward model.
            training: whether terms are normalised.

        Raises:
            RewardError: as of the manager, or a score of the model is not finite.
        """
        if judged is None:
            return await super().score(trajectories, training=training)
        for value, trajectory in zip(judged, trajectories, strict=True):
            if not math.isfinite(value):
                raise RewardError(
                    f"the reward model gives {value} to row {trajectory.uid}",
                    why="a reward that is no number cannot be learned from",
                    fix="train it again with a lower optim.lr, or actor_rollout_ref.actor.dtype=float32",
                    where="reward.reward_model.path",
                )
        if not self.with_rules:
            return [Score(self.settings.coef * value, {"rm": value}) for value in judged]
        rules = await super().score(trajectories, training=training)
        return [self._combined(value, rule) for value, rule in zip(judged, rules, strict=True)]

    def _combined(self, value: float, rule: Score) -> Score:
        added = self.settings.combine == "add"
        return dataclasses.replace(
            rule,
            total=self.settings.coef * value + (rule.total if added else 0.0),
            terms=rule.terms | {"rule": rule.total, "rm": value},
            placed=rule.placed if added else {},
        )
