"""Optimal token baseline: at each token, the group's returns weighted by the accumulated squared gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.base import Groups, Result, register_estimator, token_counts
from hone.algorithms.advantages.scan import packings, suffix_sums


@register_estimator(
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    formula="A_t = G_t - sum(G_t W_t) / (sum(W_t) + epsilon), sums over the group's t-th sampled tokens; G_t = reward to "
    "come, W_t = sum_{j <= t} rho_j^2 (1 - 2 pi_j + sum of squared probabilities at j); returns = G",
    paper="Li et al. 2026 (OTB), arXiv:2602.07078",
    group_of_one="no baseline: the advantage is the reward to come",
    scope="group",
)
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Sequence[Any] | Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> Result:
    """Subtract a separate baseline from the return of each sampled token: the one of least gradient variance.

    ``1 - 2 pi + sum pi^2`` is the squared gradient of a token's log-prob in its logits; ``rho`` are importance weights,
    if given. Where a response is longer than all others of its group, its baseline would be its own return: with
    ``handle_zero_tail`` that tail has baseline 0.

    Time counts sampled tokens, for both names. In verl the plain name compares columns of the batch, so that tool
    output shifts a response against the others of its group; only the name with ``tir_`` (tool-integrated reasoning)
    does not.
    """
    groups = Groups.from_ids(group_ids, response_mask)
    returns = torch.empty_like(token_level_rewards)
    weighted = returns.new_zeros(groups.size, returns.shape[1], dtype=torch.float64)
    weights = torch.zeros_like(weighted)
    blocks = packings(response_mask)
    for rows, packing in blocks:
        to_come = suffix_sums(packing.pack(token_level_rewards[rows]), 1.0)
        packing.unpack_into(returns[rows], to_come)
        norms = _squared_gradients(old_log_probs[rows], sum_pi_squared[rows])
        if rollout_is_weights is not None:
            norms *= rollout_is_weights[rows].square()
        gathered = packing.pack(norms).cumsum(dim=-1).mul_(packing.front)
        length = gathered.shape[1]
        weights[:, :length].index_add_(0, groups.index[rows], gathered)
        weighted[:, :length].index_add_(0, groups.index[rows], gathered.mul_(to_come))
    baselines = weighted.div_(weights.add_(epsilon))
    compared = _compared_tokens(groups, response_mask, handle_zero_tail)
    advantages = torch.empty_like(returns)
    for rows, packing in blocks:
        time = torch.arange(packing.front.shape[1], device=returns.device)
        row_baselines = baselines[groups.index[rows], : len(time)].mul_(time < compared[rows, None])
        packing.unpack_into(advantages[rows], row_baselines)
    return torch.sub(returns, advantages, out=advantages), returns


def _squared_gradients(old_log_probs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """Return ``|| d log pi / d logits ||^2`` at each token; negative rounding errors become 0."""
    return (1.0 - 2.0 * old_log_probs.exp() + sum_pi_squared).clamp_(min=0)


def _compared_tokens(groups: Groups, response_mask: Tensor, zero_tail: bool) -> Tensor:
    """Return ``[B]``, the number of first tokens of each row that have a baseline: none in a group of one."""
    lengths = token_counts(response_mask)
    longest, second, holds = groups.best_two(lengths)
    others = torch.where(holds, second, longest)
    return torch.where(groups.singleton, 0, others if zero_tail else lengths)
