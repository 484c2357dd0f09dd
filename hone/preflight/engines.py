"""Rules about engines that run in separate environments."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.tree import RLConfig
from hone.errors import ConfigError
from hone.preflight.rules import Finding, Stage, error, rule, warning


@rule("R76", RLConfig, stage=Stage.ENVIRONMENT)
def engine_is_installed(config: RLConfig) -> Iterator[Finding]:
    """An external engine is installed on this machine, unless the run attaches to a running one."""
    from hone.generation import SERVED
    from hone.generation.environments import interpreter_of

    rollout = config.actor_rollout_ref.rollout
    if rollout.name not in SERVED or rollout.engine_url is not None:
        return
    try:
        interpreter_of(rollout.name, rollout.engine_env)
    except ConfigError as missing:
        yield warning(missing.what, why=missing.why, fix=missing.fix, where=missing.where)


@rule("R76", RLConfig)
def engine_has_replicas(config: RLConfig) -> Iterator[Finding]:
    """An engine with replicas can run in separate processes."""
    from hone.generation import SERVED

    rollout = config.actor_rollout_ref.rollout
    if rollout.num_replicas is not None and rollout.name not in ("native", *SERVED):
        yield error(
            f"engine '{rollout.name}' does not support replicas, but rollout.num_replicas={rollout.num_replicas}",
            why="it only runs in the trainer's process",
            fix="actor_rollout_ref.rollout.num_replicas=null, or actor_rollout_ref.rollout.name=native",
            where="actor_rollout_ref.rollout.num_replicas",
        )


@rule("R76", RLConfig)
def engine_takes_the_adapter(config: RLConfig) -> Iterator[Finding]:
    """Sending an adapter alone needs a trained adapter and an engine that computes with it."""
    from hone.generation.options import adapter_shape

    try:
        shape = adapter_shape(config)
    except ConfigError as problem:
        yield error(problem.what, why=problem.why, fix=problem.fix, where=problem.where)
        return
    if shape is None and not config.actor_rollout_ref.rollout.merge_lora:
        yield warning(
            "rollout.merge_lora=false, but no adapter is trained",
            why="all weights are sent, as with merge_lora=true",
            fix="actor_rollout_ref.model.lora_rank=32, or actor_rollout_ref.rollout.merge_lora=true",
            where="actor_rollout_ref.rollout.merge_lora",
        )
