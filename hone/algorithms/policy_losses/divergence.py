"""Losses with a trust region measured as a divergence of the two policies, not as a ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.kl import binary_kl
from hone.algorithms.masked import where_mask
from hone.algorithms.policy_losses.base import (
    Prepared,
    TokenLoss,
    beyond_trust_region,
    by_sign,
    register_policy_loss,
    require,
    token_ratio,
)


def divergence_masked(
    old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, outside: Tensor, cap: float
) -> TokenLoss:
    """Return REINFORCE with importance weights truncated at ``cap``, without tokens ``outside`` the trust region (bool)."""
    ratio = token_ratio(old_log_probs, log_probs.detach())
    weight = ratio.clamp(max=cap).masked_fill(outside, 0.0)
    flags = {"pg_clipfrac": outside, "pg_clipfrac_lower": (ratio > cap) & ~outside}
    return TokenLoss(-advantages * weight * log_probs, ratio, flags)


@register_policy_loss(
    "dppo_tv",
    formula="-A min(r, clip_ratio_c) log pi, dropped where A > 0 and p - p_old > clip_ratio_high, or A < 0 and p_old - p > clip_ratio_low",
    paper="Qi et al. 2026, arXiv:2602.04879 (binary total variation)",
)
def dppo_tv(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> TokenLoss:
    """Limit the change of the sampled token's *probability*: a trust region in total variation.

    A ratio penalises small changes of rare tokens and allows large changes of frequent ones; the difference of
    probabilities does neither. ``clip_ratio_low`` and ``clip_ratio_high`` bound that difference here, and ``clip_ratio_c``
    truncates the importance weight.
    """
    moved = (log_probs.detach().clamp(max=0.0).exp() - old_log_probs.clamp(max=0.0).exp()) * advantages.sign()
    outside = moved > by_sign(advantages, clip_ratio_high, clip_ratio_low)
    return divergence_masked(old_log_probs, log_probs, advantages, outside, clip_ratio_c)


@register_policy_loss(
    "dppo_kl",
    formula="-A min(r, clip_ratio_c) log pi, dropped where A > 0, p > p_old and KL > clip_ratio_high, or A < 0, p < p_old and KL > clip_ratio_low",
    paper="Qi et al. 2026, arXiv:2602.04879 (binary KL)",
)
def dppo_kl(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> TokenLoss:
    """Limit KL(old, new) of the two-way choice "this token, or any other".

    ``clip_ratio_low`` and ``clip_ratio_high`` bound that KL (nats) here, and ``clip_ratio_c`` truncates the importance
    weight.
    """
    new = log_probs.detach()
    further = (new - old_log_probs) * advantages.sign() > 0
    outside = further & (binary_kl(old_log_probs, new) > by_sign(advantages, clip_ratio_high, clip_ratio_low))
    return divergence_masked(old_log_probs, log_probs, advantages, outside, clip_ratio_c)


def second_moment_outliers(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    m2_threshold: float = 0.04,
) -> Prepared:
    """Return ``dropped`` (0 or 1): tokens whose removal limits the second moment of the others to the threshold.

    Among tokens beyond the trust region, those with the largest squared log-ratio are removed first (M2PO, algorithm 1);
    tokens with equal squared log-ratios are removed together, so that the order of the rows has no effect.
    """
    require(
        m2_threshold > 0,
        f"m2_threshold={m2_threshold} must be positive",
        why="every token whose probability changed would be left out",
        fix="actor_rollout_ref.actor.policy_loss.m2_threshold=0.04",
    )
    gap = log_probs - old_log_probs
    squared = gap.square()
    counted = beyond_trust_region(gap, advantages) & response_mask
    # in ascending order the running mean only grows, and cannot exceed the threshold before the values do: sort the others
    small = counted & (squared <= m2_threshold)
    ascending = squared[counted & ~small].sort().values
    totals = where_mask(squared, small).sum(dtype=torch.float64) + ascending.cumsum(0, dtype=torch.float64)
    counts = small.sum() + torch.arange(1, len(ascending) + 1, device=ascending.device)
    kept = int((totals <= m2_threshold * counts).sum())
    if kept == len(ascending):
        return {"dropped": torch.zeros_like(squared)}
    return {"dropped": (counted & (squared >= ascending[kept])).to(squared.dtype)}


@register_policy_loss(
    "m2po",
    formula="-A r, without the tokens whose (log r)^2 keeps the mean over those with A > 0, r > 1 or A < 0, r < 1 above m2_threshold",
    paper="Zheng et al. 2025, arXiv:2510.01161, eq. 4 and 5, algorithm 1",
    across_batch=second_moment_outliers,
)
def m2po(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    prepared: Prepared,
) -> TokenLoss:
    """Limit the batch as a whole: mask only extreme outliers, so that stale data stays informative.

    Masked tokens still count in the denominator of the aggregation, as in the paper. This is the paper's algorithm; the
    code published with it turns the threshold into a PPO clip range instead.
    """
    ratio = token_ratio(old_log_probs, log_probs)
    dropped = prepared["dropped"] > 0
    loss = torch.where(dropped, 0.0, -advantages * ratio)
    squared = (log_probs.detach() - old_log_probs).square()
    return TokenLoss(loss, ratio, {"pg_clipfrac": dropped, "squared_log_ratio": squared})
