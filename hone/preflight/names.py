"""Rules about names: a chosen component must exist, and its packages must be installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator

from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig
from hone.errors import ConfigError, did_you_mean
from hone.preflight.rules import Finding, error, rule

_TRACKER_PACKAGES = {name: name for name in ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")} | {
    "otel": "opentelemetry"
}


@rule("R11", RLConfig)
def registered_names(config: RLConfig) -> Iterator[Finding]:
    """Estimator, loss, KL estimators, engine and scorer are registered."""
    from hone.algorithms import KL_KINDS, advantage_estimators, policy_losses
    from hone.generation import ENGINES, SERVED
    from hone.rewards.scorers import SCORERS

    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    chosen: list[tuple[str, str, str | None, Collection[str]]] = [
        ("algorithm.adv_estimator", "advantage estimator", algorithm.adv_estimator, advantage_estimators.names()),
        ("algorithm.kl_penalty", "KL estimator", algorithm.kl_penalty, KL_KINDS),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "policy loss",
            actor.policy_loss.loss_mode,
            policy_losses.names(),
        ),
        ("actor_rollout_ref.actor.kl_loss_type", "KL estimator", actor.kl_loss_type, KL_KINDS),
        (
            "actor_rollout_ref.rollout.name",
            "engine",
            config.actor_rollout_ref.rollout.name,
            [*ENGINES.names(), *SERVED],
        ),
        ("reward.scorer", "scorer", config.reward.scorer, SCORERS.names()),
    ]
    for key, kind, name, known in chosen:
        if name is not None and name not in known and not _is_import_path(name):
            yield error(f"unknown {kind} '{name}'", where=key, fix=did_you_mean(name, known))


@rule("R11", RLConfig)
def reward_terms(config: RLConfig) -> Iterator[Finding]:
    """The reward terms are valid, and their scorers are registered."""
    from hone.rewards.scorers import SCORERS
    from hone.rewards.terms import read_terms

    try:
        for term in read_terms(config.reward.terms):
            if term.scorer is not None:
                SCORERS.get(term.scorer)
    except ConfigError as problem:
        yield Finding(problem, stops=True)


@rule("R11", RLConfig)
def import_paths(config: RLConfig) -> Iterator[Finding]:
    """A custom estimator or loss can be imported."""
    from hone.algorithms import advantage_estimators, policy_losses

    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    for registry, name in ((advantage_estimators, config.algorithm.adv_estimator), (policy_losses, loss_mode)):
        if _is_import_path(name):
            try:
                registry.get(name)
            except ConfigError as problem:
                yield Finding(problem, stops=True)


def _is_import_path(name: str) -> bool:
    return ":" in name


@rule("R56", *TREES.values())
def trackers(config: AnyConfig) -> Iterator[Finding]:
    """Every tracker exists, and its package is installed."""
    from hone.insight.trackers import TRACKERS

    for name in config.trainer.logger:
        package = _TRACKER_PACKAGES.get(name)
        if name not in TRACKERS:
            yield error(f"unknown tracker '{name}'", where="trainer.logger", fix=did_you_mean(name, TRACKERS))
        elif package and importlib.util.find_spec(package) is None:
            yield error(
                f"tracker '{name}' needs the package {package}, which is not installed",
                where="trainer.logger",
                fix=f"pip install 'hone-rl[{name}]', or remove {name} from trainer.logger",
            )
