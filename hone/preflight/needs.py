"""What the chosen algorithm needs, for rules that depend on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hone.config.tree import RLConfig
from hone.errors import ConfigError

if TYPE_CHECKING:
    from hone.algorithms import AdvantageEstimator, PolicyLoss


def estimator(config: RLConfig) -> AdvantageEstimator | None:
    """Return the advantage estimator, None when there is none of that name (rule R11 says so)."""
    from hone.algorithms import advantage_estimators

    try:
        return advantage_estimators.get(config.algorithm.adv_estimator)
    except ConfigError:
        return None


def policy_loss(config: RLConfig) -> PolicyLoss | None:
    """Return the policy loss in use, None when there is none of that name (rule R11 says so)."""
    from hone.algorithms import policy_losses
    from hone.training.correction import loss_name

    settings, mode = correction(config), config.actor_rollout_ref.actor.policy_loss.loss_mode
    try:
        return policy_losses.get(loss_name(mode, settings) if settings else mode)
    except ConfigError:
        return None


def correction(config: RLConfig) -> dict[str, Any] | None:
    """Return every key of the rollout correction, None when its preset is unknown (rule R26 says so)."""
    from hone.training.correction import correction_settings

    try:
        return correction_settings(config.algorithm.rollout_correction)
    except ConfigError:
        return None


def needs_critic(config: RLConfig) -> bool:
    """Return whether a critic will be trained."""
    if config.critic.enable is not None:
        return config.critic.enable
    chosen = estimator(config)
    return chosen is not None and "values" in chosen.needs


def needs_reference(config: RLConfig) -> bool:
    """Return whether a KL term or a preference loss compares with the reference policy."""
    from hone.algorithms import preference_losses

    actor = config.actor_rollout_ref.actor
    pairs = actor.preference_loss.loss_mode
    by_pairs = pairs is not None and pairs in preference_losses and "reference" in preference_losses.get(pairs).needs
    return config.algorithm.use_kl_in_reward or actor.use_kl_loss or by_pairs


def needs_old_log_probs(config: RLConfig) -> bool:
    """Return whether the old log-probs take a forward pass before the update."""
    from hone.training import old_log_probs

    known = estimator(config) is not None and policy_loss(config) is not None and correction(config) is not None
    return not known or old_log_probs.needs_old_log_probs(config)
