"""Rules about dividing a model over processes: sizes that multiply, and a model whose parts divide by them."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from hone.config.tree import RLConfig
from hone.errors import ConfigError, ModelError
from hone.preflight.cluster import actor_processes, pools
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Finding, error, rule

_ACTOR = "actor_rollout_ref.actor"
_WHOLE = ("actor_rollout_ref.rollout", "reward.reward_model")  # pools whose workers hold whole models
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@rule("R70", RLConfig)
def sizes_multiply(config: RLConfig) -> Iterator[Finding]:
    """The sizes of all kinds of parallelism multiply to the number of processes, in every pool that trains or scores."""
    from hone.training.layout import Layout

    divided = {"trainer": actor_processes(config)}
    if config.trainer.runtime == "ray":
        divided |= {key: nodes * per_node for key, nodes, per_node in pools(config) if key not in _WHOLE}
    for key, processes in divided.items():
        try:
            Layout.plan(processes, config.actor_rollout_ref.actor)
        except ConfigError as e:
            of = "" if key == "trainer" else f"the pool of {key}: "
            yield Finding(ConfigError(f"{of}{e.what}", why=e.why, fix=e.fix, where=e.where), stops=True)


@rule("R71", RLConfig)
def tensor_parallel_divides(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """The model says how its matrices are cut, and its heads divide over the ranks that cut them."""
    size, model = config.actor_rollout_ref.actor.tensor_model_parallel_size, evidence.model_settings
    key = f"{_ACTOR}.tensor_model_parallel_size"
    if size == 1 or not model:
        return
    if not has_tensor_plan(str(model.get("model_type"))):
        yield error(
            f"tensor_model_parallel_size={size}, and transformers has no tensor-parallel plan for {model.get('model_type')}",
            why="which matrices may be cut, and how, is the model's knowledge",
            fix=f"{key}=1",
            where=key,
        )
        return
    heads = {"attention heads": model.get("num_attention_heads"), "key-value heads": model.get("num_key_value_heads")}
    counts = {kind: count for kind, count in heads.items() if count}
    if any(count % size for count in counts.values()):
        yield error(
            f"tensor_model_parallel_size={size} does not divide the model's "
            + " and ".join(f"{count} {kind}" for kind, count in counts.items()),
            why="every rank computes whole heads",
            fix=f"{key}=<one of {_divisors(gcd(*counts.values()))}>",
            where=key,
        )


@rule("R72", RLConfig)
def sequence_parallel_divides(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """The heads of a tensor-parallel rank divide over the ranks that share a row's tokens."""
    actor, model = config.actor_rollout_ref.actor, evidence.model_settings
    tensor, sequence = actor.tensor_model_parallel_size, actor.ulysses_sequence_parallel_size
    heads = model.get("num_attention_heads")
    key_value = model.get("num_key_value_heads") or heads
    if sequence == 1 or not heads or not key_value or heads % tensor or key_value % tensor:
        return  # R71 has told what does not divide over tensor-parallel ranks
    from hone.training.sequence_parallel import check_heads  # slow to import

    try:
        check_heads(heads // tensor, key_value // tensor, sequence)
    except ModelError as found:
        yield Finding(found, stops=True)


@rule("R73", RLConfig)
def experts_divide(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Experts divide over the ranks that share them, and there are some."""
    size, model = config.actor_rollout_ref.actor.expert_parallel_size, evidence.model_settings
    experts = next((model[key] for key in _EXPERTS if model.get(key)), None)
    key = f"{_ACTOR}.expert_parallel_size"
    if size == 1 or not model:
        return
    if experts is None:
        yield error(
            f"expert_parallel_size={size}, and a {model.get('model_type')} model has no experts",
            why="there is nothing to divide",
            fix=f"{key}=1",
            where=key,
        )
    elif experts % size:
        yield error(
            f"expert_parallel_size={size} does not divide the model's {experts} experts",
            why="every rank holds equally many whole experts",
            fix=f"{key}=<one of {_divisors(experts)}>",
            where=key,
        )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def has_tensor_plan(model_type: str) -> bool:
    """Whether transformers knows how to cut this architecture; true for one that it does not know (remote code)."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return True
    kind = CONFIG_MAPPING[model_type]
    inner = getattr(kind, "sub_configs", {}).get("text_config", kind)
    return bool(getattr(inner, "base_model_tp_plan", None) or getattr(kind, "base_model_tp_plan", None))
