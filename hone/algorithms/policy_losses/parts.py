"""What policy losses are composed of: ratios of three kinds, and clip rules.

All take ``[B, T]`` tensors that are 0 outside the mask, as :class:`~hone.algorithms.policy_losses.base.PolicyLoss` hands
them on, and return ``[B, T]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.errors import ConfigError

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +- this before every exponential, in every loss, so that none overflows."""

# ------------------------------------------------------------------------------------------------------------- ratios


def clamped_log_ratio(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """``log(policy / old policy)`` of each token, clamped to +-20; no gradient where it is clamped."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_ratio(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """Policy / old policy at each token; the log-ratio is clamped to +-20 so that the exponential stays finite."""
    return torch.exp(clamped_log_ratio(old_log_probs, log_probs))


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the selected tokens of each row, ``[B, 1]``; 0 for empty rows. ``values`` are 0 outside the mask."""
    return values.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def sequence_ratio(old_log_probs: Tensor, log_probs: Tensor, mask: Tensor) -> Tensor:
    """Length-normalised ratio of the whole sequence (GSPO, eq. 7) at each of its tokens.

    The value is the geometric mean of the row's token ratios. The gradient of a token's entry reaches that token only
    (GSPO-token, eq. 14), so that an advantage of its own stays with its token; where all tokens of a row have the same
    advantage the gradients of a row add up to those of the sequence ratio.
    """
    mean = row_mean((log_probs - old_log_probs).detach(), mask)
    log_ratio = mean + (log_probs - log_probs.detach())
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


# --------------------------------------------------------------------------------------------------------- clip rules


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and where the clip is active (bool)."""
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(free, clipped), clipped > free


def dual_clip(loss: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Limit the loss of tokens with a negative advantage to ``-A bound``, and where that limit is active (bool)."""
    ceiling = -advantages * bound
    active = (advantages < 0) & (loss > ceiling)
    return torch.where(active, ceiling, loss), active


def beyond_trust_region(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Tokens that have already moved the way their advantage pushes them, where alone PPO's clip can act (bool)."""
    return ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))


def by_sign(advantages: Tensor, positive: float, otherwise: float) -> Tensor:
    """``positive`` where the advantage is above 0, ``otherwise`` elsewhere."""
    return torch.full_like(advantages, otherwise).masked_fill_(advantages > 0, positive)


# ------------------------------------------------------------------------------------------------------------ options


def require(holds: bool, what: str, *, why: str, fix: str) -> None:
    """Refuse an option that makes no sense.

    Raises:
        ConfigError: ``holds`` is false.
    """
    if not holds:
        raise ConfigError(what, why=why, fix=fix, where="actor_rollout_ref.actor")
