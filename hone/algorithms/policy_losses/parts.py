"""What policy losses are composed of: ratios and clip rules."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def token_ratio(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """Policy / old policy at each token; the log-ratio is clamped to +-20 so that the exponential stays finite."""
    return torch.exp((log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and where the clip is active (0 or 1)."""
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(free, clipped), (clipped > free).to(ratio.dtype)


def dual_clip(loss: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Limit the loss of tokens with a negative advantage to ``-A bound``, and where that limit is active (0 or 1)."""
    ceiling = -advantages * bound
    active = (advantages < 0) & (loss > ceiling)
    return torch.where(active, ceiling, loss), active.to(loss.dtype)
