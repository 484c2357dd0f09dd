"""Rules about optimizers: groups of parameters, schedules and averages, before weights are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hone.config.derived import RunSpec
from hone.config.model import ModelConfig, OptimConfig
from hone.config.param_groups import read_param_groups
from hone.config.preference import RewardModelConfig
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig, model_block
from hone.errors import ConfigError, HoneError
from hone.preflight.cluster import actor_processes
from hone.preflight.rules import Finding, Stage, error, rule

if TYPE_CHECKING:
    from torch import nn

ACTOR, CRITIC = "actor_rollout_ref.actor.optim", "critic.optim"


def optim_blocks(config: AnyConfig) -> dict[str, OptimConfig]:
    """Return the optimizer blocks of the models that a run trains, by their keys."""
    if not isinstance(config, RLConfig):
        return {"optim": config.optim}
    critic = {CRITIC: config.critic.optim} if RunSpec(config).critic.value else {}
    return {ACTOR: config.actor_rollout_ref.actor.optim, **critic}


@rule("R85", *TREES.values())
def optimizer_settings(config: AnyConfig) -> Iterator[Finding]:
    """Entries of ``param_groups`` are well-formed, and an average of weights moves."""
    for key, optim in optim_blocks(config).items():
        try:
            read_param_groups(optim.param_groups, f"{key}.param_groups")
        except ConfigError as problem:
            yield Finding(problem, stops=True)
        if optim.ema_decay == 1:
            yield error(
                "an average of weights with ema_decay=1 never moves",
                why="it would be the initial weights for ever",
                fix=f"{key}.ema_decay=0.999, or null for no average",
                where=f"{key}.ema_decay",
            )


@rule("R85", *TREES.values(), stage=Stage.FILES)
def optimizer_of_this_model(config: AnyConfig) -> Iterator[Finding]:
    """The optimizer exists, takes its arguments and this layout, and every entry of ``param_groups`` has parameters."""
    for key, optim in optim_blocks(config).items():
        plain = optim.optimizer == "AdamW" and not optim.param_groups and not optim.override_optimizer_config
        if plain or any(finding.stops for finding in optimizer_settings(config)):
            continue
        try:
            _build(config, key, optim)
        except ConfigError as problem:
            where = problem.where.replace("optim", key, 1)
            fix = problem.fix.replace("optim.", f"{key}.")
            yield Finding(ConfigError(problem.what, why=problem.why, fix=fix, where=where), stops=True)


def _build(config: AnyConfig, key: str, optim: OptimConfig) -> None:
    """Create the optimizer of a model without storage. Raises ConfigError: it cannot be created."""
    from hone.training import eight_bits  # slow to import
    from hone.training.optimizer import build_optimizer, optimizer_groups

    if optim.optimizer == eight_bits.NAME and _divided(config, key):
        raise eight_bits.sharded_error()
    model = _without_storage(config, key)
    if model is None:
        return
    if ":" in optim.optimizer:  # what a custom optimizer does with parameters without storage is not known
        optimizer_groups(model, optim)
    else:
        build_optimizer(model, optim)


def _divided(config: AnyConfig, key: str) -> bool:
    if not isinstance(config, RLConfig):
        return actor_processes(config) > 1
    role = "actor" if key == ACTOR else "critic"
    return any(pool.divided for pool in RunSpec(config).pools if role in pool.roles)


def _without_storage(config: AnyConfig, key: str) -> nn.Module | None:
    """Return the model that an optimizer updates; None where its directory is incomplete (R08), or an adapter decides its names."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

    from hone.models.loading import VALUE_SETTINGS, as_policy, model_settings
    from hone.models.streaming import empty_model

    model, scores = model_block(config)[1], isinstance(config, RewardModelConfig)
    if key == CRITIC and isinstance(config, RLConfig):
        model = ModelConfig(path=config.critic.model.path or model.path, trust_remote_code=model.trust_remote_code)
    if model.path is None or model.lora_adapter_path or (scores and model.lora_rank):
        return None
    factory, settings = AutoModelForCausalLM, {}
    if scores:
        factory, settings = AutoModelForSequenceClassification, {"num_labels": 1}
    elif key == CRITIC:
        factory, settings = AutoModelForTokenClassification, VALUE_SETTINGS
    try:
        empty = empty_model(factory, model_settings(model, **settings), trust_remote_code=model.trust_remote_code)
    except (HoneError, OSError, ValueError, KeyError, TypeError):
        return None
    small = dataclasses.replace(model, lora_rank=min(1, model.lora_rank))
    return empty if scores or key == CRITIC else as_policy(empty, small, seed=0, trainable=True)
