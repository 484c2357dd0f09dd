"""Rewards of a run: the reward function, a reward model alone or added to it, and the length penalty of training."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from hone.algorithms import overlong_penalty
from hone.config.reward import RewardConfig
from hone.data.types import Trajectory
from hone.errors import RewardError
from hone.rewards.manager import RewardManager
from hone.rewards.outcome import NoVerdictRate, failed
from hone.rewards.rubric import Rubric
from hone.rewards.score import Cause, Score
from hone.rewards.scorers import scorer_for
from hone.rewards.target import Outcome

log = logging.getLogger(__name__)


class JudgedRewards(RewardManager):
    """Reward manager that also uses the scores of a reward model (``reward.reward_model``), alone or added.

    With a reward model, the terms of a score are ``rm``, the model's raw score; ``rule``, the reward function's or built-in scorer's
    total, if any; and its terms. A generative reward model adds its text as ``judgement``.

    Args:
        required: whether rewards change the policy. Otherwise every answer has reward 0 if a data source has no scorer.
        max_response_length: tokens near which training penalises responses (``reward.overlong_buffer``).
    """

    def __init__(self, config: RewardConfig, *, required: bool = True, max_response_length: int = 0) -> None:
        super().__init__(config)
        self._max_response_length = max_response_length
        self.settings, self.with_rules, self._required = config.reward_model, True, required
        self._judge_rate = NoVerdictRate(config.max_no_verdict_rate)

    @functools.cached_property
    def rubric(self) -> Rubric:
        """Rubric of a generative reward model."""
        return Rubric.from_config(self.config.judge)

    def check(self, data_sources: Mapping[str, int], self_scored: Collection[str] = ()) -> None:
        """Check that every data source can be scored; with ``combine=replace`` the model alone suffices.

        Raises:
            RewardError: with ``combine=add`` a data source has no scorer, or a scorer's package is missing.
        """
        unknown = [
            source
            for source in data_sources
            if not self._is_global and source not in self_scored and scorer_for(source) is None
        ]
        if self.settings.enable and self.settings.combine == "replace" and unknown:
            self.with_rules = False
            log.info("no scorer for data_source %s: only the reward model scores", ", ".join(sorted(unknown)))
        elif unknown and not self._required:
            self.with_rules = False
            log.info("no scorer for data_source %s: rewards are 0", ", ".join(sorted(unknown)))
        else:
            super().check(data_sources, self_scored)

    async def score(
        self,
        trajectories: Sequence[Trajectory],
        judged: Sequence[float] | None = None,
        *,
        judgements: Sequence[str] | None = None,
        training: bool = False,
    ) -> list[Score]:
        """Score each trajectory; scores are in the same order.

        Args:
            judged: reward model's score of each; None without a reward model.
            judgements: texts of a generative reward model; a text without a score gives no verdict.
            training: True to normalise terms, and to penalise responses near the length limit.

        Raises:
            RewardError: as :meth:`RewardManager.score`, or a score of the model is not finite.
        """
        scores = await self._judged(trajectories, judged, judgements, training=training)
        if training:
            scores = penalised(scores, trajectories, self.config, self._max_response_length)
        return scores

    async def _judged(
        self,
        trajectories: Sequence[Trajectory],
        judged: Sequence[float] | None,
        judgements: Sequence[str] | None,
        *,
        training: bool,
    ) -> list[Score]:
        if judged is None and not self.with_rules:
            return [Score(0.0) for _ in trajectories]
        if judged is None:
            return await super().score(trajectories, training=training)
        for value, trajectory in zip(judged, trajectories, strict=True):
            if judgements is None and not math.isfinite(value):
                raise RewardError(
                    f"the reward model gives row {trajectory.uid} the score {value}",
                    why="training needs finite rewards",
                    fix="train the reward model again with a lower optim.lr, or actor_rollout_ref.actor.dtype=float32",
                    where="reward.reward_model.path",
                )
        scores = [Score(0.0) for _ in judged]
        if self.with_rules:
            scores = await super().score(trajectories, training=training)
        scores = [self._combined(value, score) for value, score in zip(judged, scores, strict=True)]
        return scores if judgements is None else self._with_judgements(trajectories, scores, judged, judgements)

    def _with_judgements(
        self,
        trajectories: Sequence[Trajectory],
        scores: Sequence[Score],
        judged: Sequence[float],
        judgements: Sequence[str],
    ) -> list[Score]:
        """Add the judgements to the scores; a judgement without a score gives no verdict, as for a failing scorer."""
        results, outcomes = [], []
        for score, value, judgement in zip(scores, judged, judgements, strict=True):
            result = dataclasses.replace(score, extra=score.extra | {"judgement": judgement[-500:]})
            if not math.isfinite(value):
                result = failed(f"the reward model gave {self.rubric.missing(judgement)}", Cause.SERVICE)
                result = result if score.error is None else score
            results.append(result)
            outcomes.append(Outcome(result if score.error is None else Score(0.0)))  # other errors are already counted
        self._tolerate(trajectories, outcomes, self._judge_rate, "the reward model")
        return results

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


def penalised(
    scores: Sequence[Score], trajectories: Sequence[Trajectory], config: RewardConfig, max_response_length: int
) -> list[Score]:
    """Return the scores less the penalty of ``reward.overlong_buffer``; the segments of an episode share one length."""
    overlong = config.overlong_buffer
    if not (overlong.enable or config.reward_manager == "dapo"):
        return list(scores)
    lengths = torch.tensor(episode_lengths(trajectories))
    penalties = overlong_penalty(lengths, max_response_length, overlong.len, overlong.penalty_factor).tolist()
    result = []
    for score, penalty in zip(scores, penalties, strict=True):
        terms = {"overlong_reward": penalty, "overlong": float(penalty < 0)} if overlong.log else {}
        changes = {"total": score.total + penalty, "unshaped": score.total, "terms": score.terms | terms}
        result.append(dataclasses.replace(score, **changes))
    return result


def episode_lengths(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the response tokens of each trajectory's episode, over all segments, which share one limit."""
    total: Counter[tuple[str, int]] = Counter()
    for trajectory in trajectories:
        total[trajectory.uid, trajectory.index] += len(trajectory.response_ids)
    return [total[trajectory.uid, trajectory.index] for trajectory in trajectories]
