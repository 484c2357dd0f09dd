"""Rewards as training uses them: the scores of the reward function, and what is taken off for length."""

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
    """Scores trajectories and punishes responses that come near the length limit.

    Args:
        rewards: the reward function.
        overlong: the block ``reward.overlong_buffer``.
        max_response_length: the limit, in tokens.
    """

    def __init__(self, rewards: JudgedRewards, overlong: OverlongBufferConfig, max_response_length: int) -> None:
        self.rewards, self.overlong, self.max_response_length = rewards, overlong, max_response_length
        self.enabled = overlong.enable or rewards.config.reward_manager == "dapo"

    async def score(
        self,
        trajectories: Sequence[Trajectory],
        judged: Sequence[float] | None = None,
        *,
        words: Sequence[str] | None = None,
    ) -> list[Score]:
        """Score each trajectory; scores come back in the same order.

        Args:
            judged: the reward model's score of each, where there is one.
            words: its judgements, where it writes them.

        Raises:
            RewardError: as :meth:`~hone.rewards.manager.RewardManager.score`.
        """
        scores = await self.rewards.score(trajectories, judged, words=words, training=True)
        if not self.enabled:
            return scores
        lengths = torch.tensor(episode_lengths(trajectories))
        penalties = self._penalties(lengths).tolist()
        return [self._punished(score, penalty) for score, penalty in zip(scores, penalties, strict=True)]

    def _penalties(self, lengths: Tensor) -> Tensor:
        overlong = self.overlong
        return overlong_penalty(lengths, self.max_response_length, overlong.len, overlong.penalty_factor)

    def _punished(self, score: Score, penalty: float) -> Score:
        logged = {"overlong_reward": penalty, "overlong": float(penalty < 0)} if self.overlong.log else {}
        return dataclasses.replace(score, total=score.total + penalty, unshaped=score.total, terms=score.terms | logged)


def episode_lengths(trajectories: Sequence[Trajectory]) -> list[int]:
    """Tokens behind the prompt of each trajectory's episode: those of all its parts, which share one limit."""
    total: Counter[tuple[str, int]] = Counter()
    for trajectory in trajectories:
        total[trajectory.uid, trajectory.index] += len(trajectory.response_ids)
    return [total[trajectory.uid, trajectory.index] for trajectory in trajectories]
