"""Policy losses: what a policy gradient step minimises."""

from hone.algorithms.policy_losses import ppo
from hone.algorithms.policy_losses.base import PolicyLoss, TokenLoss, policy_losses, register_policy_loss
from hone.algorithms.policy_losses.parts import clipped_surrogate, dual_clip, token_ratio

__all__ = [
    "PolicyLoss",
    "TokenLoss",
    "clipped_surrogate",
    "dual_clip",
    "policy_losses",
    "ppo",
    "register_policy_loss",
    "token_ratio",
]
