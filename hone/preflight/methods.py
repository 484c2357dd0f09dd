"""Rules about the chosen estimator, loss and correction: what they need is there, and they fit together."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.tree import RLConfig
from hone.errors import ConfigError, did_you_mean
from hone.preflight.needs import correction, estimator, policy_loss
from hone.preflight.rules import Finding, error, rule

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


@rule("R62", RLConfig)
def further_options(config: RLConfig) -> Iterator[Finding]:
    """Options given by name are options of the chosen method."""
    from hone.algorithms.policy_losses.base import COMMON_OPTIONS

    loss, chosen = policy_loss(config), estimator(config)
    policy = config.actor_rollout_ref.actor.policy_loss
    given = [
        ("algorithm.adv_kwargs", config.algorithm.adv_kwargs, chosen, frozenset()),
        (f"{ACTOR}.policy_loss.loss_kwargs", policy.loss_kwargs, loss, COMMON_OPTIONS),
    ]
    for key, options, method, common in given:
        known = method.options | common if method else frozenset(options)
        for name in options:
            if name not in known:
                yield error(
                    f"'{method.name if method else ''}' has no option '{name}'",
                    fix=did_you_mean(name, known) if known else f"it takes no options: {key}={{}}",
                    where=f"{key}.{name}",
                )


@rule("R62", RLConfig)
def sum_pi_squared(config: RLConfig) -> Iterator[Finding]:
    """Sums of squared probabilities are computed when the estimator needs them."""
    chosen, settings = estimator(config), correction(config)
    key = f"{ACTOR}.calculate_sum_pi_squared"
    wanted = config.actor_rollout_ref.actor.calculate_sum_pi_squared
    needed = chosen is not None and "sum_pi_squared" in chosen.needs
    if needed and wanted is False:
        yield error(
            f"adv_estimator={config.algorithm.adv_estimator} needs the sums of squared probabilities",
            why="they weigh the tokens of its baseline",
            fix=f"{key}=null (computed when needed) or true",
            where=f"{key}=false",
        )
    if (needed or wanted) and settings and settings["bypass_mode"]:
        yield error(
            "sums of squared probabilities come with the trainer's log-probs, and bypass mode does not compute those",
            why=f"adv_estimator={config.algorithm.adv_estimator} needs them" if needed else f"{key}=true asks for them",
            fix=f"{CORRECTION}.bypass_mode=false" if needed else f"{key}=null",
            where=f"{CORRECTION}.bypass_mode",
        )


@rule("R62", RLConfig)
def reward_components(config: RLConfig) -> Iterator[Finding]:
    """An estimator of reward components is told which, and charges its KL elsewhere."""
    chosen, algorithm = estimator(config), config.algorithm
    if chosen is None or "reward_components" not in chosen.needs:
        return
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        yield error(
            f"adv_estimator={algorithm.adv_estimator} normalises the components of the reward one by one, and none is named",
            why="there is nothing to normalise",
            fix="algorithm.gdpo_reward_keys=[acc,format], the terms that the reward function returns beside the score",
            where="algorithm.gdpo_reward_keys",
        )
    elif weights is not None and len(weights) != len(keys):
        yield error(
            f"{len(weights)} weights for {len(keys)} reward components ({', '.join(keys)})",
            fix=f"algorithm.gdpo_reward_weights=[{','.join(['1.0'] * len(keys))}]",
            where="algorithm.gdpo_reward_weights",
        )
    if algorithm.use_kl_in_reward:
        yield error(
            f"the KL penalty in the reward is lost: adv_estimator={algorithm.adv_estimator} reads the components only",
            why="the policy would not be held to the reference at all",
            fix=f"algorithm.use_kl_in_reward=false {ACTOR}.use_kl_loss=true",
            where="algorithm.use_kl_in_reward",
        )


@rule("R19", RLConfig)
def large_enough_groups(config: RLConfig) -> Iterator[Finding]:
    """Groups have the members that estimator and dynamic sampling compare."""
    chosen, n = estimator(config), config.actor_rollout_ref.rollout.n
    if chosen is not None and 2 <= n < chosen.min_group:
        yield error(
            f"adv_estimator={config.algorithm.adv_estimator} compares {chosen.min_group} answers to one prompt, "
            f"and actor_rollout_ref.rollout.n={n}",
            why="smaller groups have no advantage",
            fix=f"actor_rollout_ref.rollout.n={max(8, chosen.min_group)}",
            where="actor_rollout_ref.rollout.n",
        )
    if config.algorithm.filter_groups.enable and n < 2 and not (chosen and "groups" in chosen.needs):
        yield error(
            f"dynamic sampling keeps groups whose answers differ, and actor_rollout_ref.rollout.n={n}",
            why="a single answer never differs: no group would be kept",
            fix="actor_rollout_ref.rollout.n=8, or algorithm.filter_groups.enable=false",
            where="algorithm.filter_groups.enable",
        )


@rule("R26", RLConfig)
def rollout_correction(config: RLConfig) -> Iterator[Finding]:
    """The parts of the rollout correction fit each other and the loss."""
    from hone.algorithms import check_rollout_correction
    from hone.training.correction import correction_settings, corrects

    try:
        settings = correction_settings(config.algorithm.rollout_correction)
        check_rollout_correction(**settings)
    except ConfigError as found:
        yield Finding(found, stops=True)
        return
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if mode == "bypass_mode" and not settings["bypass_mode"]:
        yield error(
            "policy_loss.loss_mode=bypass_mode compares with the engine's log-probs, and bypass_mode is false",
            why="the old log-probs would be the trainer's own: nothing would be corrected",
            fix=f"{CORRECTION}.bypass_mode=true (the loss follows from it), or {ACTOR}.policy_loss.loss_mode=vanilla",
            where=f"{ACTOR}.policy_loss.loss_mode",
        )
    acts = corrects(settings) or settings["loss_type"] != "ppo_clip"
    if settings["bypass_mode"] and acts and mode not in ("vanilla", "bypass_mode"):
        yield error(
            f"in bypass mode only loss_mode=vanilla can be corrected, not {mode}",
            why="weights and rejection are computed inside the loss there, and this one does not",
            fix=f"{ACTOR}.policy_loss.loss_mode=vanilla, or {CORRECTION}.bypass_mode=false",
            where=CORRECTION,
        )


@rule("R29", RLConfig)
def overlong_buffer(config: RLConfig) -> Iterator[Finding]:
    """The slope of the overlong punishment fits into a response."""
    overlong, longest = config.reward.overlong_buffer, config.data.max_response_length
    if overlong.enable and overlong.len > longest:
        yield error(
            f"reward.overlong_buffer.len={overlong.len} tokens > data.max_response_length={longest}",
            why="even an empty response would be punished",
            fix=f"reward.overlong_buffer.len={max(1, longest // 5)}",
            where="reward.overlong_buffer.len",
        )
