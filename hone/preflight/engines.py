"""Rules about engines that run in separate environments."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.tree import RLConfig
from hone.errors import ConfigError, ModelError, RequestError
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
def engine_follows_constraints(config: RLConfig) -> Iterator[Finding]:
    """A constraint on responses compiles, and the engine follows it."""
    from hone.generation.constraints import configured_constraint
    from hone.generation.grammars import check_compiles

    rollout, where = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.constraint"
    try:
        constraint = configured_constraint(rollout.constraint)
        if constraint is not None:
            check_compiles(constraint)
    except (ConfigError, RequestError) as problem:
        yield error(problem.what, why=problem.why, fix=problem.fix, where=problem.where or where)
        return
    if constraint is not None and rollout.name in ("sglang", "trtllm"):
        yield error(
            f"engine '{rollout.name}' does not follow constraints, but rollout.constraint.kind={rollout.constraint.kind}",
            why="it refuses every request with one",
            fix="actor_rollout_ref.rollout.name=native",
            where=where,
        )


@rule("R76", RLConfig)
def engine_takes_the_adapter(config: RLConfig) -> Iterator[Finding]:
    """Sending an adapter alone needs a trained adapter and an engine that computes with it."""
    from hone.generation.options import adapter_shape, needs_untied_head

    try:
        shape = adapter_shape(config)
        needs_untied_head(config)
    except ModelError:
        return  # R08 says what the model lacks
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
