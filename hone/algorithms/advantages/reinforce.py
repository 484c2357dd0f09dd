"""Estimators with a return at every token: REINFORCE++ and ReMax without a critic, and GAE with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.base import (
    Groups,
    Result,
    broadcast,
    register_estimator,
    sequence_scores,
    token_counts,
    whiten_,
)
from hone.algorithms.advantages.group_relative import centred
from hone.algorithms.advantages.scan import discounted_returns, packings, suffix_sums


@register_estimator(
    "reinforce_plus_plus",
    formula="A_t = G_t = sum_k gamma^k r_{t+k}, whitened over the batch; returns = G",
    paper="Hu 2025 (REINFORCE++), arXiv:2501.03262, global advantage normalisation",
)
def reinforce_plus_plus(token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Result:
    """Compute the discounted return of each token, whitened over the batch; no critic and no groups.

    The original recipe has its KL penalty in the reward (``algorithm.use_kl_in_reward=true``): this estimator gives
    each token its part of the penalty.
    """
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    return whiten_(returns.clone(), response_mask), returns


@register_estimator(
    "reinforce_plus_plus_baseline",
    formula="A = s - mean of the group, whitened over the tokens of the batch",
    paper="Hu 2025 (REINFORCE++), arXiv:2501.03262, REINFORCE++-baseline",
    group_of_one="no baseline: the score itself enters the whitening",
)
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, *, group_ids: Sequence[Any] | Tensor
) -> Result:
    """Compare the score of a response with its group, scaled by the standard deviation of the batch; returns equal advantages.

    Unlike GRPO it does not amplify groups of nearly equal scores: one scale serves all groups. The whitening counts
    tokens, so a long response weighs more in mean and variance than a short one.
    """
    scores = centred(sequence_scores(token_level_rewards), Groups.from_ids(group_ids, response_mask))
    advantages = whiten_(broadcast(scores, response_mask, token_level_rewards.dtype), response_mask)
    return advantages, advantages.clone()


@register_estimator(
    "remax",
    formula="A_t = sum_{k >= t} r_k - score of the prompt's greedy response; returns = sum_{k >= t} r_k",
    paper="Li et al. 2023 (ReMax), arXiv:2310.10505, algorithm 1",
    scope="sequence",
)
def remax(token_level_rewards: Tensor, response_mask: Tensor, *, reward_baselines: Tensor) -> Result:
    """Subtract the score of the prompt's greedy response from the return. This needs one more generation per prompt."""
    returns = discounted_returns(token_level_rewards, response_mask, 1.0)
    return returns - broadcast(reward_baselines, response_mask, returns.dtype), returns


@register_estimator(
    "gae",
    formula="A_t = sum_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), whitened over the batch; returns = A + V",
    paper="Schulman et al. 2016, arXiv:1506.02438, eq. 16",
)
def gae(
    token_level_rewards: Tensor, response_mask: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> Result:
    """Compute generalised advantage estimation over the selected tokens; the state after the last one has value 0.

    Advantages are whitened over all selected tokens; returns are computed before whitening.
    """
    advantages = torch.empty_like(token_level_rewards)
    for rows, packing in packings(response_mask):
        now = packing.pack(values[rows])
        delta = packing.pack(token_level_rewards[rows]) - now
        delta[:, :-1] += gamma * now[:, 1:]
        packing.unpack_into(advantages[rows], suffix_sums(delta, gamma * lam))
    returns = advantages + values
    return whiten_(advantages, response_mask), returns


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
