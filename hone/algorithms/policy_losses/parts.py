"""Components of policy losses: three kinds of ratio, and clip rules.

All take ``[B, T]`` tensors that are 0 outside the mask, as :class:`~hone.algorithms.policy_losses.base.PolicyLoss` passes
them, and return ``[B, T]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.errors import ConfigError

LOG_RATIO_LIMIT = 20.0
"""Limit of the size of log-ratios before every exponential, in every loss, so that none overflows."""

# ------------------------------------------------------------------------------------------------------------- ratios


def clamped_log_ratio(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """Return ``log(policy / old policy)`` of each token, clamped to +-20; no gradient where it is clamped."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_ratio(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """Return policy / old policy at each token; the log-ratio is clamped to +-20 so that the exponential is finite."""
    return torch.exp(clamped_log_ratio(old_log_probs, log_probs))


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the selected tokens of each row, ``[B, 1]``; 0 for empty rows. ``values`` are 0 outside the mask."""
    return values.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def sequence_ratio(old_log_probs: Tensor, log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the length-normalised ratio of the whole sequence (GSPO, eq. 7) at each of its tokens.

    The value is the geometric mean of the row's token ratios. The gradient of an entry reaches its token only
    (GSPO-token, eq. 14), so that a token-level advantage affects its token only. If all tokens of a row have the same
    advantage, the gradients of a row add up to those of the sequence ratio.
    """
    mean = row_mean((log_probs - old_log_probs).detach(), mask)
    log_ratio = mean + (log_probs - log_probs.detach())
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


# --------------------------------------------------------------------------------------------------------- clip rules


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return PPO's pessimistic loss ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and where the clip is active (bool)."""
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(free, clipped), clipped > free


def dual_clip(loss: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Limit the loss of tokens with a negative advantage to ``-A bound``; also return where it is active (bool)."""
    ceiling = -advantages * bound
    active = (advantages < 0) & (loss > ceiling)
    return torch.where(active, ceiling, loss), active


def beyond_trust_region(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return the tokens that already moved in the direction of their advantage, where PPO's clip can act (bool)."""
    return ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))


def by_sign(advantages: Tensor, positive: float, otherwise: float) -> Tensor:
    """Return ``positive`` where the advantage is above 0, ``otherwise`` elsewhere."""
    return torch.full_like(advantages, otherwise).masked_fill_(advantages > 0, positive)


# ------------------------------------------------------------------------------------------------------------ options


def require(holds: bool, what: str, *, why: str, fix: str) -> None:
    if not holds:
        raise ConfigError(what, why=why, fix=fix, where="actor_rollout_ref.actor")
