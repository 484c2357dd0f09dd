"""Losses whose gradient is that of the log-prob, weighted by constants, without a clip of the gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hone.algorithms.policy_losses.base import (
    LOG_RATIO_LIMIT,
    TokenLoss,
    clamped_log_ratio,
    register_policy_loss,
    require,
    token_ratio,
)


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
    "vespo",
    formula="-A phi log pi, phi = w^k exp(lambda (1 - w)), a constant; w = product of the sequence's r; k and lambda by the sign of A",
    paper="Shen et al. 2026, arXiv:2602.10693",
)
def vespo(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> TokenLoss:
    """Weigh whole responses by a smooth bump of their ratio, for samples of much older policies.

    The weight is 1 where policy and old policy agree, largest at a ratio of k / lambda (2/3 for good responses, 3/2 for bad ones), and
    0 far from it. Unlike in GSPO the ratio is the product of the token ratios. Weights of a rollout correction multiply the loss here;
    the authors multiply ``w`` by them.
    """
    good = advantages >= 0
    k = torch.where(good, vespo_k_pos, vespo_k_neg)
    decay = torch.where(good, vespo_lambda_pos, vespo_lambda_neg)
    log_w = clamped_log_ratio(old_log_probs, log_probs.detach()).sum(dim=-1, keepdim=True)
    log_w = log_w.clamp(math.log(1e-8), LOG_RATIO_LIMIT)
    weight = torch.exp(k * log_w + decay * (1 - log_w.exp()))
    ratio = token_ratio(old_log_probs, log_probs.detach())
    return TokenLoss(-advantages * weight * log_probs, ratio, {"vespo_weight": weight.expand_as(ratio)})


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
