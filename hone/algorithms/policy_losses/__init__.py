"""Policy losses: the objectives of policy gradient steps.

==============  ===========================================================================
``base``        masking, weights, aggregation and metric names; the mini-batch contract; ratios and clip rules;
                vanilla, sapo; gspo and geo_mean, of the ratio of a sequence
``reinforce``   gpg, cispo, topr, vespo, dro
``divergence``  dppo_tv, dppo_kl, m2po
``covariance``  clip_cov, kl_cov; selection of tokens of a batch, independent of its order
``bypass``      bypass_mode
==============  ===========================================================================
"""

from hone.algorithms.policy_losses import bypass, covariance, divergence, reinforce
from hone.algorithms.policy_losses.base import (
    PolicyLoss,
    Prepared,
    TokenLoss,
    beyond_trust_region,
    clamped_log_ratio,
    clipped_surrogate,
    dual_clip,
    policy_losses,
    register_policy_loss,
    row_mean,
    sequence_ratio,
    token_ratio,
)

__all__ = [
    "PolicyLoss",
    "Prepared",
    "TokenLoss",
    "beyond_trust_region",
    "bypass",
    "clamped_log_ratio",
    "clipped_surrogate",
    "covariance",
    "divergence",
    "dual_clip",
    "policy_losses",
    "register_policy_loss",
    "reinforce",
    "row_mean",
    "sequence_ratio",
    "token_ratio",
]
