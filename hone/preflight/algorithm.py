"""Rules about the algorithm: settings that require, exclude or ignore each other."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.check import yaml_value
from hone.config.derived import RunSpec
from hone.config.keys import documentation
from hone.config.tree import RLConfig
from hone.preflight.rules import Finding, error, rule, warning


@rule("R19", RLConfig)
def groups_of_one(config: RLConfig) -> Iterator[Finding]:
    """An estimator that compares the answers to one prompt gets at least two answers."""
    from hone.algorithms import advantage_estimators

    chosen, n = advantage_estimators.get(config.algorithm.adv_estimator), config.actor_rollout_ref.rollout.n
    if "groups" in chosen.needs and n < 2:
        yield error(
            f"adv_estimator={config.algorithm.adv_estimator} compares the answers to one prompt, "
            f"but actor_rollout_ref.rollout.n={n}",
            why=f"in a group of one: {chosen.group_of_one or 'there is nothing to compare with'}",
            fix="actor_rollout_ref.rollout.n=8 (4 to 16 are usual)",
            where="actor_rollout_ref.rollout.n",
        )


@rule("R21", RLConfig)
def critic_matches_estimator(config: RLConfig) -> Iterator[Finding]:
    """A critic is trained exactly when the estimator needs values."""
    needs_values, enabled = "values" in RunSpec(config).estimator.needs, config.critic.enable
    name = config.algorithm.adv_estimator
    if needs_values and enabled is False:
        yield error(
            f"adv_estimator={name} needs values, but critic.enable=false",
            why="without a critic the advantages have no baseline",
            fix="critic.enable=true, or algorithm.adv_estimator=grpo",
            where="critic.enable",
        )
    if not needs_values and enabled:
        yield warning(
            f"critic.enable=true, but adv_estimator={name} does not use a critic",
            why="the critic and its optimizer take memory and time without effect",
            fix="critic.enable=null, or algorithm.adv_estimator=gae",
            where="critic.enable",
        )


@rule("R22", RLConfig)
def kl_twice(config: RLConfig) -> Iterator[Finding]:
    """The KL penalty is in the reward or in the loss, not in both."""
    coefficient, loss = config.algorithm.kl_ctrl.kl_coef, config.actor_rollout_ref.actor
    if config.algorithm.use_kl_in_reward and loss.use_kl_loss:
        yield warning(
            f"the KL penalty is applied twice: {coefficient:g} in the reward and {loss.kl_loss_coef:g} in the loss",
            why="the total penalty is larger than either coefficient",
            fix="algorithm.use_kl_in_reward=false or actor_rollout_ref.actor.use_kl_loss=false",
            where="algorithm.use_kl_in_reward",
        )


@rule("R32", RLConfig)
def sampling(config: RLConfig) -> Iterator[Finding]:
    """Training samples are random and drawn from the distribution that is trained."""
    rollout = config.actor_rollout_ref.rollout
    where = "actor_rollout_ref.rollout"
    if rollout.temperature == 0:
        yield error(
            f"temperature=0 gives {rollout.n} identical answers per prompt"
            if rollout.n > 1
            else "temperature=0 always takes the most likely token",
            why="reinforcement learning needs answers that differ",
            fix=f"{where}.temperature=1.0",
            where=f"{where}.temperature",
        )
    if rollout.val_kwargs.n > 1 and rollout.val_kwargs.temperature == 0:
        yield error(
            f"validation samples {rollout.val_kwargs.n} answers per prompt at temperature=0, which are all identical",
            why="best@n and maj@n would equal the metric of one answer",
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
    if rollout.constraint.kind is not None:
        yield warning(
            f"training samples are drawn with constraint.kind={rollout.constraint.kind}",
            why="the trainer computes log-probs of the full distribution, so the ratio is biased where the constraint leaves few tokens",
            fix=f"{where}.constraint={{kind: null, text: null, file: null}}, unless every answer has to follow the format",
            where=f"{where}.constraint",
        )
    keeps = RunSpec(config).keeps_support
    if names and not keeps.value:
        yield (error if rollout.keep_support else warning)(
            f"training samples are drawn with {', '.join(f'{name}={getattr(rollout, name):g}' for name in names)}",
            why=f"the trainer computes log-probs of the full distribution, so the ratio is biased ({keeps.reason})",
            fix=" ".join(f"{where}.{name}={_default(f'{where}.{name}')}" for name in names),
            where=where,
        )


def _default(path: str) -> str:
    return next(yaml_value(key.default) for key in documentation(RLConfig) if key.path == path)
