"""Advantage estimators: from token rewards to how much better than expected each token was.

Every estimator is called the same way, ``estimator(token_level_rewards, response_mask, **inputs, **options)``, and
returns ``(advantages, returns)``, both ``[B, T]`` and 0 outside the mask. Tokens with mask 0 (padding, tool output) are
skipped: they are no steps of the policy, and a reward written on one is ignored. Rows without any selected token take
no part.

One file an idea::

    base, checks        how an estimator is registered and called, and which inputs are refused
    groups              statistics over the responses to one prompt
    tokens, scan        numbers a row to numbers a token; discounted sums over sampled tokens, without a loop over time
    group_relative      grpo, grpo_passk, rloo, opo, gpg, maxrl: a score against the scores of its group
    gdpo                several rewards, each normalised by itself
    reinforce           reinforce_plus_plus, reinforce_plus_plus_baseline, remax
    gae                 the critic's estimator
    token_baseline      optimal_token_baseline
    turns, gigpo        conversations: where rewards go, and credit by turn
"""

from hone.algorithms.advantages import gae, gdpo, gigpo, group_relative, reinforce, token_baseline
from hone.algorithms.advantages.base import INPUTS, AdvantageEstimator, advantage_estimators, register_estimator
from hone.algorithms.advantages.groups import Groups
from hone.algorithms.advantages.turns import Turns, place_rewards, turn_returns, turn_rewards

__all__ = [
    "INPUTS",
    "AdvantageEstimator",
    "Groups",
    "Turns",
    "advantage_estimators",
    "gae",
    "gdpo",
    "gigpo",
    "group_relative",
    "place_rewards",
    "register_estimator",
    "reinforce",
    "token_baseline",
    "turn_returns",
    "turn_rewards",
]
