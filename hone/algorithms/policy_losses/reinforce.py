"""Losses whose gradient is that of the log-prob, weighted by constants, without a clip of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.policy_losses.base import TokenLoss, register_policy_loss, require, token_ratio


@register_policy_loss(
    "gpg",
    formula="-A log pi",
    paper="Chu et al. 2025, arXiv:2504.02546; Williams 1992",
)
def gpg(old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> TokenLoss:
    """Use the plain policy gradient. It is exact on the first update of a batch; later ones are off-policy and uncorrected."""
    return TokenLoss(-advantages * log_probs, token_ratio(old_log_probs, log_probs.detach()))


@register_policy_loss(
    "cispo",
    formula="-A w log pi, w = clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high), a constant",
    paper="MiniMax 2025 (M1), arXiv:2506.13585, eq. 4 and 5",
)
def cispo(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> TokenLoss:
    """Use REINFORCE with clipped importance weights: a token beyond the clip keeps a gradient, of bounded size.

    The paper leaves the lower side open: ``clip_ratio_low=1``.
    """
    ratio = token_ratio(old_log_probs, log_probs.detach())
    weight = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return TokenLoss(-advantages * weight * log_probs, ratio, {"pg_clipfrac": weight != ratio})


@register_policy_loss(
    "topr",
    formula="-A w log pi, w = 1 where A >= 0, else min(product of the sequence's r, 1), a constant",
    paper="Le Roux et al. 2025, arXiv:2503.14286, canonical form (1, 1; 0, 1)",
)
def topr(old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> TokenLoss:
    """Imitate good responses, and push bad ones away only while the policy would still produce them.

    The ratio is the product of the token ratios of the sequence, as in the paper: a bad response that has become unlikely
    fades out of the gradient, so that stale data cannot drive its probability to zero.
    """
    taper = torch.exp((log_probs.detach() - old_log_probs).sum(dim=-1, keepdim=True).clamp(max=0.0))
    weight = torch.where(advantages < 0, taper, 1.0)
    ratio = token_ratio(old_log_probs, log_probs.detach())
    return TokenLoss(-advantages * weight * log_probs, ratio, {"topr_weight": weight})


@register_policy_loss(
    "dro",
    formula="-(A log pi - dro_beta / 2 (log r)^2)",
    paper="Richemond et al. 2024, arXiv:2405.19107; Kimi k1.5 2025, arXiv:2501.12599",
)
def dro(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    dro_beta: float = 0.05,
) -> TokenLoss:
    """Use the policy gradient with a quadratic pull towards the old policy, in place of a clip.

    The squared log-ratio is not clamped: its gradient always grows with the distance.
    """
    require(
        dro_beta > 0,
        f"dro_beta={dro_beta} must be positive",
        why="without the quadratic term the policy is not kept near the one that sampled the data",
        fix="actor_rollout_ref.actor.policy_loss.dro_beta=0.05",
    )
    gap = log_probs - old_log_probs
    ratio = token_ratio(old_log_probs, log_probs.detach())
    return TokenLoss(0.5 * dro_beta * gap.square() - advantages * log_probs, ratio, {"squared_log_ratio": gap.square()})
