"""Rewards of a reward model, alone or together with those of the reward function."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Collection, Mapping, Sequence

from hone.config.reward import RewardConfig
from hone.data.types import Trajectory
from hone.errors import RewardError
from hone.rewards.manager import RewardManager
from hone.rewards.outcome import failed
from hone.rewards.pool import Outcome
from hone.rewards.rubric import Rubric
from hone.rewards.score import Score
from hone.rewards.scorers import scorer_for

log = logging.getLogger(__name__)


class JudgedRewards(RewardManager):
    """The rewards of a run: of the reward function or the built-in scorers, and where a reward model is used
    (``reward.reward_model``), of that, alone or added.

    Terms of a score with a reward model: ``rm``, the model's score as it is; ``rule``, what the reward function or the built-in
    scorer says, where there is one; and the terms of that. A model that judges in words leaves them as ``judgement`` beside.

    Args:
        config: the block ``reward``.
    """

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(config)
        self.settings, self.with_rules = config.reward_model, True

    @functools.cached_property
    def rubric(self) -> Rubric:
        """What a generative reward model was asked."""
        return Rubric.of(self.config.judge)

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
        self,
        trajectories: Sequence[Trajectory],
        judged: Sequence[float] | None = None,
        *,
        words: Sequence[str] | None = None,
        training: bool = False,
    ) -> list[Score]:
        """Score each trajectory; scores come back in the same order.

        Args:
            trajectories: what was played.
            judged: the reward model's score of each; None where there is no reward model.
            words: the judgements that a generative one wrote; a score that they do not hold is an error.
            training: whether terms are normalised.

        Raises:
            RewardError: as of the manager, or a score of the model is not finite.
        """
        if judged is None:
            return await super().score(trajectories, training=training)
        for value, trajectory in zip(judged, trajectories, strict=True):
            if words is None and not math.isfinite(value):
                raise RewardError(
                    f"the reward model gives {value} to row {trajectory.uid}",
                    why="a reward that is no number cannot be learned from",
                    fix="train it again with a lower optim.lr, or actor_rollout_ref.actor.dtype=float32",
                    where="reward.reward_model.path",
                )
        scores = [Score(0.0) for _ in judged]
        if self.with_rules:
            scores = await super().score(trajectories, training=training)
        scores = [self._combined(value, score) for value, score in zip(judged, scores, strict=True)]
        return scores if words is None else self._worded(trajectories, scores, judged, words)

    def _worded(
        self, trajectories: Sequence[Trajectory], scores: Sequence[Score], judged: Sequence[float], words: Sequence[str]
    ) -> list[Score]:
        """The scores with their judgements; an error where none was read, as of a scorer that fails."""
        read, unread = [], []
        for score, value, said in zip(scores, judged, words, strict=True):
            found = dataclasses.replace(score, extra=score.extra | {"judgement": said[-500:]})
            if not math.isfinite(value):
                found = failed(score.error or f"the reward model gave {self.rubric.missing(said)}")
            read.append(found)
            unread.append(Outcome(found if score.error is None else Score(0.0)))  # the others are counted already
        self._tolerate(trajectories, unread)
        return read

    def _combined(self, value: float, rule: Score) -> Score:
        if not self.with_rules:
            return Score(self.settings.coef * value, {"rm": value})
        added = self.settings.combine == "add"
        return dataclasses.replace(
            rule,
            total=self.settings.coef * value + (rule.total if added else 0.0),
            terms=rule.terms | {"rule": rule.total, "rm": value},
            placed=rule.placed if added else {},
        )
