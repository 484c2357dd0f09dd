"""Rules about a frozen base in 4 or 8 bits."""

from __future__ import annotations

from pathlib import Path

from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block, parallel_block
from hone.generation import is_served
from hone.preflight.evidence import Evidence
from hone.preflight.layouts import actor_processes
from hone.preflight.plan.model import EXPERTS
from hone.preflight.rules import Findings, Stage, error, rule, warning
from hone.training.backends.registry import BACKENDS, backend_of


@rule("R94")
def packed_base_is_frozen(config: AnyConfig) -> Findings:
    """A base in 4 or 8 bits is frozen under an adapter, and one process holds all of it."""
    block, model = model_block(config)
    if model.quantization == "none":
        return
    key, none = f"{block}.quantization", f"{block}.quantization=none"
    if model.lora_rank == 0 and model.lora_adapter_path is None:
        yield error(
            f"{key}={model.quantization}, but no adapter is trained",
            why="an update is smaller than the steps between 16 or 255 values, so packed weights cannot learn",
            fix=f"{block}.lora_rank=16, or {none}",
            where=key,
        )
    processes, parallel = actor_processes(config), parallel_block(config)
    if backend_of(parallel, processes) is not BACKENDS.get("local"):
        strategy = parallel.strategy or "fsdp2"
        yield error(
            f"{key}={model.quantization} with {parallel.key('strategy')}={strategy} on {processes} process{'es' * (processes > 1)}",
            why="only the backend local holds packed weights; the others divide matrices of floating-point numbers",
            fix=f"trainer.nnodes=1 trainer.n_gpus_per_node=1 {parallel.key('strategy')}=local, or {none}",
            where=key,
        )


@rule("R94")
def engine_reads_the_packed_base(config: RLConfig) -> Findings:
    """The engine computes with the trainer's packed weights, in its process."""
    shared = config.actor_rollout_ref
    rollout, kind = shared.rollout, shared.model.quantization
    separate = rollout.enable_resource_pool and "its own devices"
    if kind == "none" or not (is_served(rollout) or rollout.engine_url or separate):
        return
    yield error(
        f"actor_rollout_ref.model.quantization={kind}, but the engine '{rollout.name}' has {separate or 'processes of its own'}",
        why="it would hold the base in 16 or 32 bits, and sample from another policy than the one that is trained",
        fix="actor_rollout_ref.rollout.name=native actor_rollout_ref.rollout.num_replicas=null "
        "actor_rollout_ref.rollout.engine_url=null actor_rollout_ref.rollout.enable_resource_pool=false, or "
        "actor_rollout_ref.model.quantization=none",
        where="actor_rollout_ref.model.quantization",
    )


@rule("R94", Stage.FILES)
def model_can_be_packed(config: AnyConfig, evidence: Evidence) -> Findings:
    """A model in 4 or 8 bits is dense, and the package that packs it is installed."""
    from hone.models.four_bits import packed_base, require_package

    block, model = model_block(config)
    if model.quantization == "none":
        method = packed_base(Path(model.lora_adapter_path))[0] if model.lora_adapter_path else "none"
        if method != "none":
            yield warning(
                f"the adapter in '{model.lora_adapter_path}' was trained on a base in {method}, but {block}.quantization=none",
                why="it learned with the rounded weights, and does worse with others",
                fix=f"{block}.quantization={method}",
            )
        return

    key = f"{block}.quantization"
    require_package(model.quantization, key)
    experts = next((name for name in EXPERTS if evidence.model_settings.get(name)), None)
    if experts is not None:
        yield error(
            f"{key}={model.quantization}, but '{model.path}' has {experts}={evidence.model_settings[experts]}",
            why="the matrices of experts are no linear layers, which alone are packed, so 4 bits would save little",
            fix=f"{key}=none, or a dense model",
            where=key,
        )
