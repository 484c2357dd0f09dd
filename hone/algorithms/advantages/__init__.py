"""Advantage estimators: from token rewards to advantages of tokens.

Every estimator is called the same way, ``estimator(token_level_rewards, response_mask, **inputs, **options)``, and
returns ``(advantages, returns)``, both ``[B, T]`` and 0 outside the mask. Tokens with mask 0 (padding, tool output) are
skipped: they are not steps of the policy, and rewards on them are ignored. Rows without any selected token do not
take part.

One file per idea::

    base                      registration and calls of estimators, checks of their inputs; row values to token values;
                              statistics over the responses to one prompt
    scan                      discounted sums over sampled tokens, without a loop over time
    group_relative            grpo, grpo_passk, rloo, opo, gpg, maxrl: a score compared with the scores of its group;
                              gdpo: several rewards, each normalised separately
    reinforce                 reinforce_plus_plus, reinforce_plus_plus_baseline, remax; gae, the critic's estimator;
                              optimal_token_baseline
    turn_level                conversations: credit by turn
    roles                     rae: self-play, an average for each role
"""

from hone.algorithms.advantages import group_relative, reinforce, roles, turn_level
from hone.algorithms.advantages.base import INPUTS, AdvantageEstimator, Groups, advantage_estimators, register_estimator
from hone.algorithms.advantages.turn_level import Turns, turn_returns

__all__ = [
    "INPUTS",
    "AdvantageEstimator",
    "Groups",
    "Turns",
    "advantage_estimators",
    "group_relative",
    "register_estimator",
    "reinforce",
    "roles",
    "turn_level",
    "turn_returns",
]
