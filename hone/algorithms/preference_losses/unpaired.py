"""Losses on single responses labelled good or bad."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.masked import masked_mean, where_mask
from hone.algorithms.preference_losses.base import LabelLoss, Responses, register_preference_loss


@register_preference_loss(
    "kto",
    formula="w (1 - sigmoid(beta (r - kl))) if desirable, w (1 - sigmoid(beta (kl - r))) if not; r = log pi - log pi_ref",
    paper="Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8",
)
def kto(
    responses: Responses,
    labels: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LabelLoss:
    """Use labels of single responses instead of pairs, compared with the current KL to the reference (Kahneman-Tversky).

    The estimate of the KL is a constant of the update and the same for all its micro-batches.

    The paper advises weights for which ``desirable_weight x good responses`` is 1 to 4/3 times ``undesirable_weight x
    bad ones``.
    """
    gap = beta * (responses.log_ratio - kl)
    loss = torch.where(
        labels, desirable_weight * (1 - torch.sigmoid(gap)), undesirable_weight * (1 - torch.sigmoid(-gap))
    )
    return LabelLoss(loss, beta * responses.log_ratio, (beta * kl).expand_as(gap))


def kto_kl(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """Return KTO's estimate of the KL to the reference: ``max(0, mean of log pi(y'|x) - log pi_ref(y'|x))``.

    ``y'`` are responses to *other* prompts (Ethayarajh et al. 2024, section 4.2), ``[B, T]``; rows without a token are ignored.
    A scalar without gradient, for the argument ``kl`` of the loss.
    """
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    policy, reference = (where_mask(x.detach(), response_mask).to(dtype).sum(-1) for x in (log_probs, ref_log_probs))
    return masked_mean(policy - reference, response_mask.bool().any(-1)).clamp(min=0)
