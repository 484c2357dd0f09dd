"""Advantage estimators: from token rewards to how much better than expected each token was.

Every estimator is called the same way, ``estimator(token_level_rewards, response_mask, **inputs, **options)``, and
returns ``(advantages, returns)``, both ``[B, T]`` and 0 outside the mask. Tokens with mask 0 (padding, tool output) are
skipped: they are no steps of the policy, and a reward written on one is ignored. Rows without any selected token take
no part.
"""

from hone.algorithms.advantages import gae, group_relative
from hone.algorithms.advantages.base import INPUTS, AdvantageEstimator, advantage_estimators, register_estimator
from hone.algorithms.advantages.groups import Groups

__all__ = [
    "INPUTS",
    "AdvantageEstimator",
    "Groups",
    "advantage_estimators",
    "gae",
    "group_relative",
    "register_estimator",
]
