"""Losses of the ratio to the old policy: PPO's clip and the soft gate that replaces it, and the ratio of a whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.policy_losses.base import TokenLoss, register_policy_loss
from hone.algorithms.policy_losses.parts import (
    by_sign,
    clamped_log_ratio,
    clipped_surrogate,
    dual_clip,
    require,
    row_mean,
    sequence_ratio,
    token_ratio,
)


@register_policy_loss(
    "vanilla",
    formula="max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)), at most -A clip_ratio_c where A < 0",
    paper="Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5",
)
def vanilla(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> TokenLoss:
    """Use PPO's clipped objective, with separate lower and upper clips (DAPO's clip-higher) and the dual clip.

    The dual clip limits the weight of a token with a negative advantage, a side that PPO's clip leaves open.
    """
    ratio = token_ratio(old_log_probs, log_probs)
    loss, clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    loss, lower = dual_clip(loss, advantages, clip_ratio_c)
    return TokenLoss(loss, ratio, {"pg_clipfrac": clipped, "pg_clipfrac_lower": lower})


@register_policy_loss(
    "sapo",
    formula="-A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg",
    paper="Gao et al. 2025, arXiv:2511.20347",
)
def sapo(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> TokenLoss:
    """Use a sigmoid gate in place of the clip: the gradient is PPO's at ratio 1 and fades smoothly on both sides.

    A larger temperature fades faster; ``tau_neg`` above ``tau_pos`` damps negative advantages more. The paper averages
    over the tokens of a sequence, then over sequences: ``loss_agg_mode=seq-mean-token-mean``.
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        require(
            tau > 0,
            f"{name}={tau} must be positive",
            why="it is the steepness of the gate",
            fix=f"actor_rollout_ref.actor.{name}=1.0",
        )
    ratio = token_ratio(old_log_probs, log_probs)
    tau = by_sign(advantages, tau_pos, tau_neg)
    return TokenLoss(-advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau), ratio)


@register_policy_loss(
    "gspo",
    formula="max(-A s, -A clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high)), s = exp(mean over the sequence of log r)",
    paper="Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7; gradient per token: eq. 13 and 14",
)
def gspo(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> TokenLoss:
    """Apply PPO's clip to the length-normalised ratio of the sequence: a sequence is clipped as a whole.

    A mean of log-ratios changes far less than one of them: the paper clips at 3e-4 and 4e-4, and averages over the tokens
    of a sequence, then over sequences (``loss_agg_mode=seq-mean-token-mean``).
    """
    ratio = sequence_ratio(old_log_probs, log_probs, response_mask)
    loss, clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    return TokenLoss(loss, ratio, {"pg_clipfrac": clipped})


@register_policy_loss(
    "geo_mean",
    formula="-A g, g = exp(mean over the sequence of log r, cut at clip_ratio_high where A > 0, -clip_ratio_low where A < 0)",
    paper="Zhao et al. 2025, arXiv:2507.20673",
)
def geo_mean(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> TokenLoss:
    """Use the geometric mean of the clipped token ratios of a sequence, in place of PPO's arithmetic one.

    The clip acts on each token, in log space and only on the side that its advantage pushes to: the paper's range
    (e^-0.4, e^0.4) is ``clip_ratio_low=0.4 clip_ratio_high=0.4``. A token without advantage counts as ratio 1. The
    paper's normalisation is ``loss_agg_mode=seq-mean-token-mean``; it is global here, not over a micro-batch.
    """
    free = clamped_log_ratio(old_log_probs, log_probs)
    cut = torch.where(advantages > 0, free.clamp(max=clip_ratio_high), free.clamp(min=-clip_ratio_low))
    cut = torch.where(advantages == 0, 0.0, cut)
    ratio = torch.exp(row_mean(cut, response_mask)).expand_as(advantages)
    clipped = cut.detach() != free.detach()
    flags = {"pg_clipfrac": clipped & (advantages > 0), "pg_clipfrac_lower": clipped & (advantages < 0)}
    return TokenLoss(-advantages * ratio, ratio, flags)
