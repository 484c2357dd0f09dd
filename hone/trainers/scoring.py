"""Training rewards: scores of the reward function minus a length penalty."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from hone.algorithms import overlong_penalty
from hone.config.reward import OverlongBufferConfig
from hone.data.types import Trajectory
from hone.rewards.score import Score
from hone.trainers.judged_rewards import JudgedRewards


class TrainingRewards:
    """Scoring of trajectories with a penalty for responses near the length limit.

    Args:
        rewards: rewards without the penalty.
        overlong: config block ``reward.overlong_buffer``.
        max_response_length: maximum tokens of a response.
    """

    def __init__(self, rewards: JudgedRewards, overlong: OverlongBufferConfig, max_response_length: int) -> None:
        self.rewards, self.overlong, self.max_response_length = rewards, overlong, max_response_length
        self.enabled = overlong.enable or rewards.config.reward_manager == "dapo"

    async def score(
        self,
        trajectories: Sequence[Trajectory],
        judged: Sequence[float] | None = None,
        *,
        judgements: Sequence[str] | None = None,
    ) -> list[Score]:
        """Score each trajectory; scores are in the same order.

        Args:
            judged: reward model's score of each; None without a reward model.
            judgements: texts of a generative reward model, or None.

        Raises:
            RewardError: see :meth:`~hone.rewards.manager.RewardManager.score`.
        """
        scores = await self.rewards.score(trajectories, judged, judgements=judgements, training=True)
        if not self.enabled:
            return scores
        lengths = torch.tensor(episode_lengths(trajectories))
        penalties = self._penalties(lengths).tolist()
        return [self._with_penalty(score, penalty) for score, penalty in zip(scores, penalties, strict=True)]

    def _penalties(self, lengths: Tensor) -> Tensor:
        overlong = self.overlong
        return overlong_penalty(lengths, self.max_response_length, overlong.len, overlong.penalty_factor)

    def _with_penalty(self, score: Score, penalty: float) -> Score:
        penalty_terms = {"overlong_reward": penalty, "overlong": float(penalty < 0)} if self.overlong.log else {}
        return dataclasses.replace(
            score, total=score.total + penalty, unshaped=score.total, terms=score.terms | penalty_terms
        )


def episode_lengths(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the response tokens of each trajectory's episode, over all segments, which share one limit."""
    total: Counter[tuple[str, int]] = Counter()
    for trajectory in trajectories:
        total[trajectory.uid, trajectory.index] += len(trajectory.response_ids)
    return [total[trajectory.uid, trajectory.index] for trajectory in trajectories]
