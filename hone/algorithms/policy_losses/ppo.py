"""PPO's clipped objective."""

from __future__ import annotations

from torch import Tensor

from hone.algorithms.policy_losses.base import TokenLoss, register_policy_loss
from hone.algorithms.policy_losses.parts import clipped_surrogate, dual_clip, token_ratio
from hone.errors import ConfigError


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
    """PPO's clipped objective, with different lower and upper clips (DAPO's clip-higher) and the dual clip.

    Raises:
        ConfigError: ``clip_ratio_c`` is not above 1: the dual clip would cut into the ordinary one.
    """
    if clip_ratio_c <= 1:
        raise ConfigError(
            f"clip_ratio_c={clip_ratio_c} must be above 1",
            why="with a negative advantage every ratio above it is cut off, the on-policy ratio 1 included",
            fix="actor_rollout_ref.actor.clip_ratio_c=3.0",
        )
    ratio = token_ratio(old_log_probs, log_probs)
    loss, clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    loss, lower = dual_clip(loss, advantages, clip_ratio_c)
    return TokenLoss(loss, ratio, {"pg_clipfrac": clipped, "pg_clipfrac_lower": lower})
