"""What the chosen algorithm needs, for rules that depend on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.config.tree import RLConfig

if TYPE_CHECKING:
    from hone.algorithms import AdvantageEstimator


def estimator(config: RLConfig) -> AdvantageEstimator | None:
    """Return the advantage estimator, None when there is none of that name (rule R11 says so)."""
    from hone.algorithms import advantage_estimators

    name = config.algorithm.adv_estimator
    return advantage_estimators.get(name) if name in advantage_estimators else None


def needs_critic(config: RLConfig) -> bool:
    """Return whether a critic will be trained."""
    if config.critic.enable is not None:
        return config.critic.enable
    chosen = estimator(config)
    return chosen is not None and "values" in chosen.needs
