"""Where the old log-probs come from: a forward pass of their own, the update's, or the engine that sampled."""

from __future__ import annotations

from hone.algorithms import advantage_estimators, policy_losses
from hone.config.tree import RLConfig
from hone.training.correction import correction_settings, corrects, loss_name


def needs_old_log_probs(config: RLConfig) -> bool:
    """Whether the trainer's log-probs of what was sampled take a forward pass of their own, before the update.

    Where a batch gives one update and nothing needs them before it, the policy of the update's pass is the old one, and that
    pass gives them. In bypass mode the engine does.
    """
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    settings = correction_settings(algorithm.rollout_correction)
    if settings["bypass_mode"]:
        return False
    estimator = advantage_estimators.get(algorithm.adv_estimator)
    several = actor.ppo_epochs > 1 or actor.ppo_mini_batch_size < config.data.train_batch_size
    prepares = policy_losses.get(loss_name(actor.policy_loss.loss_mode, settings)).needs_preparation
    return (
        actor.recompute_old_log_probs
        or several
        or prepares
        or corrects(settings)
        or algorithm.use_kl_in_reward
        or algorithm.use_pf_ppo
        or actor.preference_loss.loss_mode is not None
        or bool(actor.calculate_sum_pi_squared)
        or not {"old_log_probs", "sum_pi_squared"}.isdisjoint(estimator.needs | estimator.uses)
    )
