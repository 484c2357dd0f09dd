"""Rules about the algorithm: parts that need each other, exclude each other, or do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.check import yaml_value
from hone.config.keys import documentation
from hone.config.tree import RLConfig
from hone.preflight.needs import estimator
from hone.preflight.rules import Finding, error, rule, warning


@rule("R19", RLConfig)
def groups_of_one(config: RLConfig) -> Iterator[Finding]:
    """An estimator that compares the answers to one prompt gets at least two."""
    chosen, n = estimator(config), config.actor_rollout_ref.rollout.n
    if chosen is not None and "groups" in chosen.needs and n < 2:
        yield error(
            f"adv_estimator={config.algorithm.adv_estimator} compares the answers to one prompt, "
            f"and actor_rollout_ref.rollout.n={n}",
            why=f"in a group of one: {chosen.group_of_one or 'there is nothing to compare with'}",
            fix="actor_rollout_ref.rollout.n=8 (4 to 16 are usual)",
            where="actor_rollout_ref.rollout.n",
        )


@rule("R21", RLConfig)
def critic_matches_estimator(config: RLConfig) -> Iterator[Finding]:
    """A critic is trained exactly when the estimator needs values."""
    chosen, enabled, name = estimator(config), config.critic.enable, config.algorithm.adv_estimator
    if chosen is None:
        return
    if "values" in chosen.needs and enabled is False:
        yield error(
            f"adv_estimator={name} needs values, and critic.enable=false",
            why="without a critic there is no baseline to compare a token with",
            fix="critic.enable=true, or algorithm.adv_estimator=grpo",
            where="critic.enable",
        )
    if "values" not in chosen.needs and enabled:
        yield warning(
            f"a critic is trained, and adv_estimator={name} does not use it",
            why="it costs a second model and its optimizer for nothing",
            fix="critic.enable=null, or algorithm.adv_estimator=gae",
            where="critic.enable",
        )


@rule("R22", RLConfig)
def kl_twice(config: RLConfig) -> Iterator[Finding]:
    """The KL penalty is in the reward or in the loss."""
    coefficient, loss = config.algorithm.kl_ctrl.kl_coef, config.actor_rollout_ref.actor
    if config.algorithm.use_kl_in_reward and loss.use_kl_loss:
        yield warning(
            f"the KL penalty is applied twice: {coefficient:g} in the reward and {loss.kl_loss_coef:g} in the loss",
            why="the policy is held to the reference more than either number says",
            fix="algorithm.use_kl_in_reward=false or actor_rollout_ref.actor.use_kl_loss=false",
            where="algorithm.use_kl_in_reward",
        )


@rule("R32", RLConfig)
def sampling(config: RLConfig) -> Iterator[Finding]:
    """Training samples are random, and drawn from the distribution that is trained."""
    rollout = config.actor_rollout_ref.rollout
    where = "actor_rollout_ref.rollout"
    if rollout.temperature == 0:
        yield error(
            f"temperature=0 gives {rollout.n} identical answers a prompt"
            if rollout.n > 1
            else "temperature=0 takes the likeliest token always",
            why="reinforcement learns from the difference between tries",
            fix=f"{where}.temperature=1.0",
            where=f"{where}.temperature",
        )
    if rollout.val_kwargs.n > 1 and rollout.val_kwargs.temperature == 0:
        yield error(
            f"validation draws {rollout.val_kwargs.n} answers a prompt at temperature=0, all identical",
            why="best@n and maj@n would say nothing",
            fix=f"{where}.val_kwargs.temperature=1.0 or {where}.val_kwargs.n=1",
            where=f"{where}.val_kwargs.n",
        )
    changed = {
        "top_k": rollout.top_k > 0,
        "top_p": rollout.top_p < 1,
        "min_p": rollout.min_p > 0,
        "repetition_penalty": rollout.repetition_penalty != 1,
    }
    names = [name for name, is_changed in changed.items() if is_changed]
    if names:
        yield warning(
            f"training samples are drawn with {', '.join(f'{name}={getattr(rollout, name):g}' for name in names)}",
            why="the trainer's log-probs are those of the whole distribution: the ratio is biased",
            fix=" ".join(f"{where}.{name}={_default(f'{where}.{name}')}" for name in names),
            where=where,
        )


def _default(path: str) -> str:
    return next(yaml_value(key.default) for key in documentation(RLConfig) if key.path == path)
