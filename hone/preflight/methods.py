"""Rules about the chosen estimator, loss and correction: their requirements, and how they combine."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.derived import RunSpec
from hone.config.tree import RLConfig
from hone.errors import ConfigError, did_you_mean
from hone.preflight.rules import Finding, error, rule

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


@rule("R62", RLConfig)
def known_options(config: RLConfig) -> Iterator[Finding]:
    """Options in adv_kwargs and loss_kwargs exist in the chosen method."""
    from hone.algorithms import advantage_estimators, policy_losses
    from hone.algorithms.policy_losses.base import COMMON_OPTIONS

    chosen = advantage_estimators.get(config.algorithm.adv_estimator)
    loss = policy_losses.get(RunSpec(config).policy_loss)
    policy = config.actor_rollout_ref.actor.policy_loss
    given = [
        ("algorithm.adv_kwargs", config.algorithm.adv_kwargs, chosen, frozenset()),
        (f"{ACTOR}.policy_loss.loss_kwargs", policy.loss_kwargs, loss, COMMON_OPTIONS),
    ]
    for key, options, method, common in given:
        known = method.options | common
        for name in options:
            if name not in known:
                yield error(
                    f"'{method.name}' has no option '{name}'",
                    fix=did_you_mean(name, known) if known else f"{key}={{}}: it has no options",
                    where=f"{key}.{name}",
                )


@rule("R62", RLConfig)
def sum_pi_squared(config: RLConfig) -> Iterator[Finding]:
    """The sums of squared probabilities are computed when the estimator needs them."""
    spec = RunSpec(config)
    key = f"{ACTOR}.calculate_sum_pi_squared"
    wanted = config.actor_rollout_ref.actor.calculate_sum_pi_squared
    needed = "sum_pi_squared" in spec.estimator.needs
    if needed and wanted is False:
        yield error(
            f"adv_estimator={config.algorithm.adv_estimator} needs the sums of squared probabilities",
            why="its baseline weights tokens by them",
            fix=f"{key}=null (computed when needed) or true",
            where=f"{key}=false",
        )
    if (needed or wanted) and spec.bypass:
        yield error(
            "the trainer computes sums of squared probabilities with its old log-probs, which bypass_mode=true skips",
            why=f"adv_estimator={config.algorithm.adv_estimator} needs them" if needed else f"{key}=true requests them",
            fix=f"{CORRECTION}.bypass_mode=false" if needed else f"{key}=null",
            where=f"{CORRECTION}.bypass_mode",
        )


@rule("R62", RLConfig)
def reward_components(config: RLConfig) -> Iterator[Finding]:
    """An estimator of reward components has their names and weights, and no KL penalty in the reward."""
    algorithm = config.algorithm
    if "reward_components" not in RunSpec(config).estimator.needs:
        return
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        yield error(
            f"adv_estimator={algorithm.adv_estimator} normalises each reward component, but algorithm.gdpo_reward_keys is not set",
            why="it needs the names of the components",
            fix="algorithm.gdpo_reward_keys=[acc,format], the terms that the reward function returns besides the score",
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
            f"use_kl_in_reward=true, but adv_estimator={algorithm.adv_estimator} reads only the reward components",
            why="the KL penalty would have no effect",
            fix=f"algorithm.use_kl_in_reward=false {ACTOR}.use_kl_loss=true",
            where="algorithm.use_kl_in_reward",
        )


@rule("R62", RLConfig)
def turns_can_be_forked(config: RLConfig) -> Iterator[Finding]:
    """An estimator that forks turns has an engine with the weights that sampled, entropies, and episodes that can be replayed."""
    spec = RunSpec(config)
    if "turn_values" not in spec.estimator.needs:
        return
    rollout, name = config.actor_rollout_ref.rollout, config.algorithm.adv_estimator
    obstacles = [
        (
            spec.asynchronous,
            "trainer.async_training.max_staleness",
            "0",
            "the weights that sampled an episode continue it",
        ),
        (
            config.algorithm.use_kl_in_reward,
            "algorithm.use_kl_in_reward",
            "false",
            "values of turns are rewards without the KL penalty, so the last turns would pay for all of it",
        ),
        (
            spec.bypass,
            f"{CORRECTION}.bypass_mode",
            "false",
            "turns are chosen by the entropy of the old log-probs' pass",
        ),
        (
            rollout.multi_turn.subagents,
            "actor_rollout_ref.rollout.multi_turn.subagents",
            "false",
            "parallel conversations cannot be replayed",
        ),
        (
            not rollout.multi_turn.enable,
            "actor_rollout_ref.rollout.multi_turn.enable",
            "true",
            "episodes of one turn have nothing to fork",
        ),
    ]
    for holds, key, value, why in obstacles:
        if holds:
            yield error(f"adv_estimator={name} cannot fork turns", why=why, fix=f"{key}={value}", where=key)


@rule("R19", RLConfig)
def large_enough_groups(config: RLConfig) -> Iterator[Finding]:
    """Groups are large enough for the estimator and for dynamic sampling."""
    from hone.algorithms import advantage_estimators

    chosen, n = advantage_estimators.get(config.algorithm.adv_estimator), config.actor_rollout_ref.rollout.n
    if 2 <= n < chosen.min_group:
        yield error(
            f"adv_estimator={config.algorithm.adv_estimator} compares {chosen.min_group} answers to one prompt, "
            f"but actor_rollout_ref.rollout.n={n}",
            why="smaller groups have no advantage",
            fix=f"actor_rollout_ref.rollout.n={max(8, chosen.min_group)}",
            where="actor_rollout_ref.rollout.n",
        )
    if config.algorithm.filter_groups.enable and n < 2 and "groups" not in chosen.needs:
        yield error(
            f"dynamic sampling keeps groups whose answers differ, but actor_rollout_ref.rollout.n={n}",
            why="a group of one answer is never kept",
            fix="actor_rollout_ref.rollout.n=8, or algorithm.filter_groups.enable=false",
            where="algorithm.filter_groups.enable",
        )


@rule("R26", RLConfig)
def rollout_correction(config: RLConfig) -> Iterator[Finding]:
    """The settings of the rollout correction are compatible with each other and the loss."""
    from hone.algorithms import check_rollout_correction

    spec = RunSpec(config)
    try:
        settings = spec.correction
        check_rollout_correction(**settings)
    except ConfigError as problem:
        yield Finding(problem, stops=True)
        return
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if mode == "bypass_mode" and not settings["bypass_mode"]:
        yield error(
            "policy_loss.loss_mode=bypass_mode needs the engine's log-probs as the old ones, but bypass_mode=false",
            why="the old log-probs would be the trainer's, so nothing would be corrected",
            fix=f"{CORRECTION}.bypass_mode=true (the loss follows from it), or {ACTOR}.policy_loss.loss_mode=vanilla",
            where=f"{ACTOR}.policy_loss.loss_mode",
        )
    acts = spec.corrects or settings["loss_type"] != "ppo_clip"
    if settings["bypass_mode"] and acts and mode not in ("vanilla", "bypass_mode"):
        yield error(
            f"with bypass_mode=true only loss_mode=vanilla can be corrected, not loss_mode={mode}",
            why="the loss computes the importance weights and rejection in this mode, and this loss does not support it",
            fix=f"{ACTOR}.policy_loss.loss_mode=vanilla, or {CORRECTION}.bypass_mode=false",
            where=CORRECTION,
        )


@rule("R29", RLConfig)
def overlong_buffer(config: RLConfig) -> Iterator[Finding]:
    """The buffer of the overlong penalty is not longer than a response."""
    overlong, longest = config.reward.overlong_buffer, config.data.max_response_length
    if overlong.enable and overlong.len > longest:
        yield error(
            f"reward.overlong_buffer.len={overlong.len} tokens > data.max_response_length={longest}",
            why="even an empty response would be penalised",
            fix=f"reward.overlong_buffer.len={max(1, longest // 5)}",
            where="reward.overlong_buffer.len",
        )
