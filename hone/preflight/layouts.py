"""Rules about sharding a model over processes: parallel sizes that multiply, and dimensions that divide by them."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from hone.config.derived import RunSpec
from hone.config.limits import REPORT_EXPERTS
from hone.config.parallel_layout import Layout
from hone.config.pools import check_engines
from hone.config.specs import spec_of
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig, model_block, parallel_block
from hone.errors import ConfigError, ModelError
from hone.preflight.cluster import actor_processes
from hone.preflight.evidence import Evidence, trained_models
from hone.preflight.plan.model import has_tensor_plan
from hone.preflight.rules import Finding, error, rule
from hone.training.backends.fsdp2.pipeline_models import require_divisible
from hone.training.backends.registry import BACKENDS, backend_of

FSDP2_NAMES = (None, "fsdp2", "fsdp")
"""Values of ``strategy`` with which a model on several processes has the backend fsdp2."""
_ROLLOUT = "actor_rollout_ref.rollout"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@rule("R70", *TREES.values())
def sizes_multiply(config: AnyConfig) -> Iterator[Finding]:
    """Parallel sizes multiply to the number of processes in every pool that trains or scores."""
    divided, parallel = {"trainer": actor_processes(config)}, parallel_block(config)
    if config.trainer.runtime == "ray":
        divided |= {pool.block: pool.world for pool in spec_of(config).pools if not pool.replicated}
    for key, processes in divided.items():
        try:
            backend_of(parallel, processes)
            Layout.plan(processes, parallel)
        except ConfigError as e:
            prefix = "" if key == "trainer" else f"the pool of {key}: "
            yield Finding(ConfigError(f"{prefix}{e.what}", why=e.why, fix=e.fix, where=e.where), stops=True)


@rule("R71", *TREES.values())
def tensor_parallel_divides(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """The model has a tensor-parallel plan, and its heads divide over the tensor-parallel ranks."""
    parallel, model = parallel_block(config), evidence.model_settings
    size, key = parallel.tensor_model_parallel_size, parallel.key("tensor_model_parallel_size")
    if size == 1 or not model:
        return
    if not has_tensor_plan(str(model.get("model_type"))):
        yield error(
            f"tensor_model_parallel_size={size}, but transformers has no tensor-parallel plan for {model.get('model_type')}",
            why="the plan defines how each matrix is sharded",
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


@rule("R72", *TREES.values())
def sequence_parallel_divides(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """The heads of a tensor-parallel rank divide over the sequence-parallel ranks."""
    parallel, model = parallel_block(config), evidence.model_settings
    tensor, sequence = parallel.tensor_model_parallel_size, parallel.ulysses_sequence_parallel_size
    heads = model.get("num_attention_heads")
    key_value = model.get("num_key_value_heads") or heads
    if sequence == 1 or not heads or not key_value or heads % tensor or key_value % tensor:
        return  # R71 reports it
    from hone.training.backends.fsdp2.sequence_parallel import check_heads  # slow to import

    try:
        check_heads(heads // tensor, key_value // tensor, sequence, parallel.key("ulysses_sequence_parallel_size"))
    except ModelError as problem:
        yield Finding(problem, stops=True)


@rule("R72", *TREES.values())
def rings_have_no_dropout(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """With context parallelism the model has no dropout of attention probabilities."""
    parallel, dropout = parallel_block(config), evidence.model_settings.get("attention_dropout")
    if parallel.context_parallel_size == 1 or not dropout:
        return
    from hone.training.backends.fsdp2.ring import check_dropout  # slow to import

    try:
        check_dropout(dropout, model_block(config)[0], parallel.key("context_parallel_size"))
    except ModelError as problem:
        yield Finding(problem, stops=True)


@rule("R91", *TREES.values())
def pipeline_divides(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """With strategy=fsdp2: models that pipeline stages divide are of a supported family, and have a layer for every stage."""
    parallel = parallel_block(config)
    stages, key = parallel.pipeline_model_parallel_size, parallel.key("pipeline_model_parallel_size")
    if stages == 1 or parallel.strategy not in FSDP2_NAMES:
        return
    for path, settings in trained_models(config, evidence):
        try:
            require_divisible(settings, stages, str(path), key)
        except ModelError as problem:
            yield Finding(problem, stops=True)
    if isinstance(config, RLConfig) and RunSpec(config).follows_engine_experts:
        yield error(
            f"router_replay.mode=R3 with {key}={stages}",
            why="the stages of strategy=fsdp2 choose their experts themselves",
            fix=f"actor_rollout_ref.actor.router_replay.mode=disabled, or {key}=1",
            where="actor_rollout_ref.actor.router_replay.mode",
        )


@rule("R73", *TREES.values())
def experts_divide(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """A model with expert parallelism has experts, and they divide over the ranks."""
    parallel, model = parallel_block(config), evidence.model_settings
    size, key = parallel.expert_parallel_size, parallel.key("expert_parallel_size")
    experts = next((model[key] for key in _EXPERTS if model.get(key)), None)
    if size == 1 or not model:
        return
    if experts is None:
        yield error(
            f"expert_parallel_size={size}, but a {model.get('model_type')} model has no experts",
            why="expert parallelism shards experts",
            fix=f"{key}=1",
            where=key,
        )
    elif experts % size:
        yield error(
            f"expert_parallel_size={size} does not divide the model's {experts} experts",
            why="every rank holds the same number of whole experts",
            fix=f"{key}=<one of {_divisors(experts)}>",
            where=key,
        )


@rule("R87", RLConfig)
def experts_can_be_followed(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Router replay has a model with experts, and an engine that reports them."""
    rollout, model = config.actor_rollout_ref.rollout, evidence.model_settings
    if not RunSpec(config).follows_engine_experts:
        return
    key = "actor_rollout_ref.actor.router_replay.mode"
    if model and not any(model.get(name) for name in _EXPERTS):
        yield error(
            f"router_replay.mode=R3, but a {model.get('model_type')} model has no experts",
            why="router replay follows the experts that the engine chose",
            fix=f"{key}=disabled",
            where=key,
        )
    if rollout.name not in REPORT_EXPERTS:
        yield error(
            f"router_replay.mode=R3, but engine {rollout.name} does not report the experts of a token",
            why="the trainer would choose them itself, as with router_replay.mode=disabled",
            fix=f"{_ROLLOUT}.name=native, or {key}=disabled",
            where=key,
        )


@rule("R79", RLConfig)
def engines_fit_devices(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """The workers of a node divide into whole engines, and the model's heads over the processes of an engine."""
    try:
        check_engines(config)
    except ConfigError as problem:
        yield Finding(problem, stops=True)
    rollout, model, key = config.actor_rollout_ref.rollout, evidence.model_settings, f"{_ROLLOUT}.devices"
    if rollout.devices and len(rollout.devices) % rollout.devices_per_engine:
        yield error(
            f"rollout.devices has {len(rollout.devices)} GPUs, and an engine takes {rollout.devices_per_engine}",
            why="the last GPUs would belong to no engine",
            fix=f"{key}=<a multiple of {rollout.devices_per_engine} GPUs>",
            where=key,
        )
    heads = model.get("num_attention_heads") if model else None
    if heads and heads % rollout.tensor_model_parallel_size:
        key = f"{_ROLLOUT}.tensor_model_parallel_size"
        yield error(
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} does not divide the model's {heads} "
            "attention heads",
            why="every process of an engine computes whole heads",
            fix=f"{key}=<one of {_divisors(heads)}>",
            where=key,
        )


@rule("R78", RLConfig)
def micro_batches_can_be_saved(config: RLConfig) -> Iterator[Finding]:
    """The micro-batches of trainer.save_microbatch_steps belong to steps of the run, and to a model in one process."""
    trainer, key = config.trainer, "trainer.save_microbatch_steps"
    steps, processes = trainer.save_microbatch_steps, actor_processes(config)
    strategy = config.actor_rollout_ref.actor.strategy
    if steps and not _is_local(config, processes):
        yield error(
            f"{key}={steps}, but the actor has {processes} processes and strategy={strategy or 'null'}",
            why="each process holds a part of the weights and gradients; the oracle compares whole ones",
            fix=f"{key}=[], or a run in one process (trainer.runtime=local)",
            where=key,
        )
    if steps and RunSpec(config).follows_engine_experts:
        yield error(
            f"{key}={steps}, but router_replay.mode=R3 follows the experts of the engine",
            why="the oracle computes the forward pass by itself, with experts of its own",
            fix=f"{key}=[], or actor_rollout_ref.actor.router_replay.mode=disabled",
            where=key,
        )
    first = 1 + (trainer.critic_warmup if RunSpec(config).critic.value else 0)
    last = trainer.total_training_steps
    outside = [step for step in steps if step < first or (last is not None and step > last)]
    if outside:
        yield error(
            f"{key} has {outside}, but the policy is updated in steps {first} to {last or 'the end'}",
            why="nothing would be saved for `hone oracle`",
            fix=f"{key}=[{', '.join(str(step) for step in steps if step not in outside) or first}]",
            where=key,
        )


def _is_local(config: RLConfig, processes: int) -> bool:
    try:
        return backend_of(config.actor_rollout_ref.actor, processes) is BACKENDS.get("local")
    except ConfigError:
        return True  # R70 reports it


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
