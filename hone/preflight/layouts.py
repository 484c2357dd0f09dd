"""Rules about dividing a model over processes: sizes that multiply, and a model whose parts divide by them."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from hone.config.tree import RLConfig
from hone.errors import ConfigError
from hone.preflight.cluster import actor_processes
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Finding, error, rule

_ACTOR = "actor_rollout_ref.actor"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@rule("R70", RLConfig)
def sizes_multiply(config: RLConfig) -> Iterator[Finding]:
    """The sizes of all kinds of parallelism multiply to the number of processes."""
    from hone.training.layout import Layout

    try:
        Layout.plan(actor_processes(config), config.actor_rollout_ref.actor)
    except ConfigError as found:
        yield Finding(found, stops=True)


@rule("R71", RLConfig)
def heads_divide(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Attention heads divide over the ranks that share them (tensor and sequence parallel together)."""
    actor, model = config.actor_rollout_ref.actor, evidence.model_settings
    tensor, sequence = actor.tensor_model_parallel_size, actor.ulysses_sequence_parallel_size
    heads = model.get("num_attention_heads")
    shared = model.get("num_key_value_heads") or heads
    if not heads or not shared:
        return
    for key, size, held in (
        ("tensor_model_parallel_size", tensor, {"attention heads": heads, "key-value heads": shared}),
        ("ulysses_sequence_parallel_size", sequence, {"attention heads of a tensor-parallel rank": heads // tensor}),
    ):
        for name, count in held.items():
            if count % size:
                most = gcd(*held.values())
                sizes = [d for d in range(1, most + 1) if most % d == 0]
                yield error(
                    f"{key}={size}, and the model has {count} {name}",
                    why="every rank computes whole heads",
                    fix=f"{_ACTOR}.{key}=<one of {', '.join(map(str, sizes))}>",
                    where=f"{_ACTOR}.{key}",
                )
                break


@rule("R72", RLConfig)
def matrices_divide(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """The width of the feed-forward layers divides over tensor-parallel ranks."""
    size, model = config.actor_rollout_ref.actor.tensor_model_parallel_size, evidence.model_settings
    width = model.get("intermediate_size")
    if width and width % size:
        yield error(
            f"tensor_model_parallel_size={size} does not divide the model's intermediate_size={width}",
            why="every rank holds an equal part of each matrix",
            fix=f"{_ACTOR}.tensor_model_parallel_size={gcd(width, size)}",
            where=f"{_ACTOR}.tensor_model_parallel_size",
        )


@rule("R73", RLConfig)
def experts_divide(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Experts divide over the ranks that share them, and there are some."""
    size, model = config.actor_rollout_ref.actor.expert_parallel_size, evidence.model_settings
    experts = next((model[key] for key in _EXPERTS if model.get(key)), None)
    if size == 1 or not model:
        return
    if experts is None:
        yield error(
            f"expert_parallel_size={size}, and a {model.get('model_type')} model has no experts",
            why="there is nothing to divide",
            fix=f"{_ACTOR}.expert_parallel_size=1",
            where=f"{_ACTOR}.expert_parallel_size",
        )
    elif experts % size:
        sizes = [d for d in range(1, experts + 1) if experts % d == 0]
        yield error(
            f"expert_parallel_size={size} does not divide the model's {experts} experts",
            why="every rank holds equally many whole experts",
            fix=f"{_ACTOR}.expert_parallel_size=<one of {', '.join(map(str, sizes))}>",
            where=f"{_ACTOR}.expert_parallel_size",
        )
