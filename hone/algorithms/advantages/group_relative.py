"""Estimators that compare the score of a response with those of the other responses to its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.base import Result, register_estimator
from hone.algorithms.advantages.groups import Groups
from hone.algorithms.advantages.placing import sequence_scores, spread


@register_estimator(
    "grpo",
    "grpo_vectorized",
    needs=["groups"],
    formula="A = (s - mean of the group) / (std of the group + epsilon); without norm_adv_by_std_in_grpo A = s - mean",
    paper="Shao et al. 2024, arXiv:2402.03300, eq. 4; without std: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783",
    group_of_one="no baseline: the advantage is the score itself (divided by 1 + epsilon when normalising)",
    scope="group",
)
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Sequence[Any] | Tensor,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Result:
    """Score of a response against the mean of its group, the same on all its tokens; returns equal advantages.

    The standard deviation divides by n - 1. A group of equal scores has advantage 0.
    """
    groups = Groups.of(group_ids, response_mask)
    scores = sequence_scores(token_level_rewards, response_mask)
    advantages = normalised(scores, groups, by_std=norm_adv_by_std_in_grpo, epsilon=epsilon)
    return spread(advantages, response_mask, token_level_rewards.dtype)


def centred(scores: Tensor, groups: Groups) -> Tensor:
    """``s - mean of the group``, ``[B]``; the score itself where there is no other to compare with."""
    return scores - torch.where(groups.alone, 0.0, groups.mean(scores))


def normalised(scores: Tensor, groups: Groups, *, by_std: bool, epsilon: float) -> Tensor:
    """GRPO's advantage, ``[B]``: centred, and with ``by_std`` divided by the group's standard deviation + epsilon."""
    advantages = centred(scores, groups)
    return advantages / (torch.where(groups.alone, 1.0, groups.std(scores)) + epsilon) if by_std else advantages
