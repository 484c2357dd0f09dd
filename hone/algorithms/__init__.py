"""Advantages, losses, KL and aggregation, as pure functions of tensors and plain numbers.

>>> import torch
>>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])  # two answers to one prompt, the first one right
>>> advantages, _ = advantage_estimators.get("grpo")(rewards, torch.ones(2, 2), group_ids=["a", "a"])
>>> [round(x, 3) for x in advantages[:, 0].tolist()]
[0.707, -0.707]
"""

from hone.algorithms.advantages import AdvantageEstimator, advantage_estimators
from hone.algorithms.distillation import (
    DISTILLATION_MODES,
    distillation_advantages,
    distillation_loss,
    distillation_token_loss,
)
from hone.algorithms.entropy import EntropyController, largest_share
from hone.algorithms.kl import (
    DIVERGENCES,
    KL_KINDS,
    AdaptiveKLController,
    FixedKLController,
    KLController,
    apply_kl_penalty,
    divergence,
    full_kl,
    kl_controller,
    kl_penalty,
)
from hone.algorithms.logits import (
    chunked_log_probs,
    chunked_sum_pi_squared,
    entropy_from_logits,
    sum_pi_squared_from_logits,
    token_log_probs,
)
from hone.algorithms.masked import AGGREGATION_MODES, aggregate_loss, masked_mean, masked_sum
from hone.algorithms.off_policy import (
    Correction,
    check_rollout_correction,
    off_policy_metrics,
    rollout_correction,
)
from hone.algorithms.overlong import overlong_penalty
from hone.algorithms.policy_losses.base import PolicyLoss, TokenLoss, policy_losses
from hone.algorithms.preference_losses.base import PreferenceLoss, preference_losses
from hone.algorithms.preference_losses.direct import kto_kl
from hone.algorithms.preference_losses.pairs import best_worst_pairs
from hone.algorithms.resampling import REWEIGHT_METHODS, resample, resampling_weights
from hone.algorithms.reward_model import bradley_terry_loss
from hone.algorithms.value import value_loss
from hone.methods import ROLLOUT_CORRECTION_PRESETS

__all__ = [
    "AGGREGATION_MODES",
    "DISTILLATION_MODES",
    "DIVERGENCES",
    "KL_KINDS",
    "REWEIGHT_METHODS",
    "ROLLOUT_CORRECTION_PRESETS",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "Correction",
    "EntropyController",
    "FixedKLController",
    "KLController",
    "PolicyLoss",
    "PreferenceLoss",
    "TokenLoss",
    "advantage_estimators",
    "aggregate_loss",
    "apply_kl_penalty",
    "best_worst_pairs",
    "bradley_terry_loss",
    "check_rollout_correction",
    "chunked_log_probs",
    "chunked_sum_pi_squared",
    "distillation_advantages",
    "distillation_loss",
    "distillation_token_loss",
    "divergence",
    "entropy_from_logits",
    "full_kl",
    "kl_controller",
    "kl_penalty",
    "kto_kl",
    "largest_share",
    "masked_mean",
    "masked_sum",
    "off_policy_metrics",
    "overlong_penalty",
    "policy_losses",
    "preference_losses",
    "resample",
    "resampling_weights",
    "rollout_correction",
    "sum_pi_squared_from_logits",
    "token_log_probs",
    "value_loss",
]
