"""Losses of the ratio of a whole sequence. They need whole rows, which every micro-batch has."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.policy_losses.base import TokenLoss, register_policy_loss
from hone.algorithms.policy_losses.parts import clamped_log_ratio, clipped_surrogate, row_mean, sequence_ratio


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
