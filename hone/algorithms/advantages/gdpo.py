"""GDPO: several rewards, each normalised separately before they are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.base import Groups, Result, broadcast, register_estimator, whiten_
from hone.algorithms.advantages.group_relative import normalised
from hone.errors import ConfigError, did_you_mean


@register_estimator(
    "gdpo",
    formula="A = sum_k w_k (s_k - mean of the group) / (std of the group + epsilon), whitened over the batch",
    paper="Liu et al. 2026 (GDPO), arXiv:2601.05242, decoupled and batch-wise normalisation",
    group_of_one="no baseline: each component is the score itself (divided by 1 + epsilon when normalising)",
)
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Sequence[Any] | Tensor,
    reward_components: Mapping[str, Tensor],
    gdpo_reward_keys: Sequence[str] | None = None,
    gdpo_reward_weights: Sequence[float] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Result:
    """Add GRPO's advantage of each reward component with weights; returns equal advantages.

    Responses with equal sums but different components keep different advantages: a right answer in the wrong form is not
    worth the same as a wrong answer in the right form. ``gdpo_reward_keys`` selects the components (null: all),
    ``gdpo_reward_weights`` has one weight for each (null: 1). The token rewards are not used, and a KL penalty among
    them has no effect: use a KL term in the loss. The paper whitens over responses; here, as in verl, it is over tokens.
    """
    keys, weights = _chosen(reward_components, gdpo_reward_keys, gdpo_reward_weights)
    groups = Groups.from_ids(group_ids, response_mask)
    parts = [
        weight * normalised(reward_components[key], groups, by_std=norm_adv_by_std_in_grpo, epsilon=epsilon)
        for key, weight in zip(keys, weights, strict=True)
    ]
    total = torch.stack(parts).sum(dim=0)
    advantages = whiten_(broadcast(total, response_mask, token_level_rewards.dtype), response_mask)
    return advantages, advantages.clone()


def _chosen(
    components: Mapping[str, Tensor], keys: Sequence[str] | None, weights: Sequence[float] | None
) -> tuple[list[str], list[float]]:
    chosen = list(components) if keys is None else list(keys)
    if not chosen:
        raise ConfigError(
            "gdpo has 0 reward components",
            fix="algorithm.gdpo_reward_keys=[correct,format]",
            where="algorithm.gdpo_reward_keys",
        )
    for key in chosen:
        if key not in components:
            raise ConfigError(
                f"reward component '{key}' is missing",
                why="gdpo normalises each component separately",
                fix=f"let the reward function return it in addition to the score. {did_you_mean(key, components)}",
                where="algorithm.gdpo_reward_keys",
            )
    if weights is not None and len(weights) != len(chosen):
        raise ConfigError(
            f"gdpo_reward_weights has {len(weights)} entries for {len(chosen)} components",
            fix=f"algorithm.gdpo_reward_weights={[1.0] * len(chosen)}",
            where="algorithm.gdpo_reward_weights",
        )
    return chosen, [1.0] * len(chosen) if weights is None else [float(w) for w in weights]
