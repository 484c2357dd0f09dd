"""The plan of a run: its memory, its time, what fits, and with a cluster where its roles should live.

Every combination of pools (all roles together, or the engines, the critic or both on devices of their own), of tensor and sequence parallel
ranks (a ring where heads do not divide) and of copies is fitted to the devices; of those that fit, the fastest step wins. This is the search
of HybridFlow (Sheng et al. 2024, section 6) by enumeration, which is exact for this few choices.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

from hone.config.derived import RunSpec
from hone.config.dtypes import dtype_keys
from hone.config.pools import Pool, engine_devices
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block
from hone.data.model_settings import dequantised_by, read_settings
from hone.errors import ConfigError, ModelError
from hone.preflight.plan.devices import GIB, Cluster, Device
from hone.preflight.plan.fit import Fitter, Fitting, budget_key, set_key
from hone.preflight.plan.memory import (
    Memory,
    Phase,
    cache_shape,
    cache_space,
    checkpoint_bytes,
    served_rows,
    shards_of,
    state_bytes,
    token_bytes,
    uses_pages,
)
from hone.preflight.plan.model import ModelShape, has_tensor_plan, shape_of
from hone.preflight.plan.work import TrainedModel, Work, other_shapes


@dataclass(frozen=True)
class Plan:
    """The prediction for a run, as it is or, with a cluster, as placed."""

    config: AnyConfig
    device: Device
    work: Work
    memories: tuple[Memory, ...]  # of one process of each pool, with the settings as they are
    time: StepTime
    fitting: Fitting
    limit: float  # bytes that a process may fill
    placements: tuple[Placement, ...] = ()  # that were compared, the best first; empty without a cluster

    @property
    def validation(self) -> tuple[int, float] | None:
        """Answers of one validation, and the seconds to generate them; None without one or where the files are not here."""
        work, config = self.work, self.config
        rows = validation_rows(config) if isinstance(config, RLConfig) and _every(config.trainer.test_freq) else 0
        if work.rollout is None or not rows:
            return None
        samples = work.rollout.val_kwargs.n
        every = replace(work, batch=rows, samples=samples)
        return rows * samples, _generation(every, work.pool_of("rollout"), self.device)

    @property
    def checkpoint(self) -> float:
        """Bytes of one checkpoint."""
        return checkpoint_bytes(self.work)

    @property
    def fits(self) -> bool:
        return all(memory.peak.total <= self.limit for memory in self.memories)


def plan_of(
    config: AnyConfig, device: Device, *, shape: ModelShape | None = None, activation_scale: float = 1.0
) -> Plan:
    """Plan a run on devices of one kind, as its configuration places it.

    Raises:
        ModelError: the model's config.json does not describe a decoder.
        ConfigError: the sizes of parallelism do not divide.
    """
    fitter = Fitter(device, shape or model_shape(config), other_shapes(config), activation_scale)
    return _plan(config, fitter, fitter.fit(config))


def search(config: RLConfig, cluster: Cluster, *, shape: ModelShape | None = None) -> Plan:
    """Return the plan of the best placement of a run on a cluster.

    Raises ConfigError: the settings leave nothing to place.
    """
    fitter = Fitter(cluster.device, shape or model_shape(config), other_shapes(config))
    ranked = placements(config, cluster, fitter)
    if not ranked:
        raise ConfigError(
            f"no placement of this run on {cluster.nodes}x{cluster.per_node}",
            why="no sizes of parallelism divide the model's heads and the devices",
            where="--cluster",
            fix="--cluster with a power of two of devices on each node",
        )
    return _plan(ranked[0].fitting.config, fitter, ranked[0].fitting, tuple(ranked))


def _plan(config: AnyConfig, fitter: Fitter, fitting: Fitting, ranked: tuple[Placement, ...] = ()) -> Plan:
    work, device = fitter.work(config), fitter.device
    return Plan(config, device, work, fitter.memories(work), step_time(work, device), fitting, fitter.limit, ranked)


def dtype_of(plan: Plan) -> tuple[str, str]:
    key, bfloat16 = dtype_keys(plan.config)[0], plan.device.computes_bfloat16
    return key.resolved(bfloat16=bfloat16), key.source(bfloat16=bfloat16)


def model_shape(config: AnyConfig) -> ModelShape:
    """Return the shape of the trained model.

    Raises ModelError: its config.json is missing, or does not describe a decoder.
    """
    where, block = model_block(config)
    settings = read_settings(block.path)
    dequantised_by(settings, block.path or "")
    shape = shape_of(block)
    if shape is None:
        raise ModelError(
            f"the config.json of '{block.path}' (model_type {settings.get('model_type')}) lacks sizes that the plan knows, such as hidden_size"
            if settings
            else f"'{block.path}' has no config.json of a decoder",
            why="its layers, widths and vocabulary decide about memory and time; weights are not needed",
            where=f"{where}.path",
            fix=f"{where}.path=<Hugging Face model directory, or a folder with its config.json>",
        )
    return shape


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data; sizes in bytes, times in seconds."""
    return {
        "device": dataclasses.asdict(plan.device),
        "model": dataclasses.asdict(plan.work.actor.shape),
        "dtype": dict(zip(("value", "source"), dtype_of(plan), strict=True)),
        "fits": plan.fits,
        "limit": plan.limit,
        "pools": [memory.as_json() for memory in plan.memories],
        "step_seconds": plan.time.as_json(),
        "validation": dict(zip(("answers", "seconds"), plan.validation, strict=True)) if plan.validation else None,
        "checkpoint_bytes": plan.checkpoint,
        "largest_micro_batch": plan.fitting.largest_budget,
        "fits_with_knobs": plan.fitting.fits,
        "knobs": [dataclasses.asdict(knob) for knob in plan.fitting.knobs],
        "faster": plan.fitting.faster,
        "activation_scale": plan.work.activation_scale,
        "placements": [_placement(placement) for placement in plan.placements],
    }


def _placement(placement: Placement) -> dict[str, Any]:
    fitting = placement.fitting
    return {
        "settings": list(placement.settings),
        "words": placement.words,
        "fits": fitting.fits,
        "knobs": [knob.setting for knob in fitting.knobs],
        "micro_batch": fitting.largest_budget,
        "peak": fitting.fullest.peak.total,
        "peak_phase": fitting.fullest.peak.name,
        "step_seconds": placement.time.as_json(),
    }


_ACTOR = "actor_rollout_ref.actor"
_BLOCKS = {"rollout": "actor_rollout_ref.rollout", "critic": "critic"}
Size = tuple[int, int]  # nodes, and devices on each


@dataclass(frozen=True)
class Placement:
    """One way to use the cluster, and the overrides that make it."""

    settings: tuple[str, ...]
    words: str
    fitting: Fitting
    time: StepTime

    @property
    def order(self) -> tuple[bool, bool, float, int]:
        """Sort key: placements that fit, without adapters where possible, by time or missing memory, by simplicity."""
        fits, knobs = self.fitting.fits, self.fitting.knobs
        adapters = fits and any("lora_rank" in knob.setting for knob in knobs)
        return not fits, adapters, self.time.total if fits else self.fitting.fullest.peak.total, len(self.settings)


def placements(config: RLConfig, cluster: Cluster, fitter: Fitter) -> list[Placement]:
    """Return every placement: the fastest first, then those that do not fit by the memory that is missing."""
    ranked = []
    for settings, words, variant in _variants(config, cluster, fitter):
        try:
            fittings = [fitter.fit(variant), fitter.fit_with_offloading(variant)]
        except ConfigError:  # sizes that do not multiply
            continue
        fittings = [_with_largest_micro_batch(fitting, fitter) for fitting in fittings]
        ways = [Placement(settings, words, fit, step_time(fit.work, cluster.device)) for fit in fittings]
        ranked.append(min(ways, key=lambda way: way.order))
    return sorted(ranked, key=lambda placement: placement.order)


def _with_largest_micro_batch(fitting: Fitting, fitter: Fitter) -> Fitting:
    if not fitting.fits or not fitting.largest_budget:
        return fitting
    config = copy.deepcopy(fitting.config)
    set_key(config, budget_key(config), fitting.largest_budget)
    work = fitter.work(config)
    return replace(fitting, config=config, work=work, memories=fitter.memories(work))


def _variants(config: RLConfig, cluster: Cluster, fitter: Fitter) -> Iterator[tuple[tuple[str, ...], str, RLConfig]]:
    heads = gcd(fitter.shape.heads, fitter.shape.key_value_heads)
    separate = [(), ("rollout",)] + ([("critic",), ("rollout", "critic")] if RunSpec(config).critic.value else [])
    divides = has_tensor_plan(fitter.shape.kind)
    for (nodes, per_node), pools in (sizes for roles in separate for sizes in _pools(cluster, roles)):
        for tensor, row in itertools.product(_powers(per_node), repeat=2):
            if tensor * row > per_node or heads % tensor or (tensor > 1 and not divides):
                continue
            sequence, context = (row, 1) if heads % (tensor * row) == 0 else (1, row)
            for shards in [-1] + ([per_node // tensor] if nodes > 1 else []):
                variant = copy.deepcopy(config)
                keys = {
                    "trainer.runtime": "ray",
                    "trainer.nnodes": nodes,
                    "trainer.n_gpus_per_node": per_node,
                    f"{_ACTOR}.tensor_model_parallel_size": tensor,
                    f"{_ACTOR}.ulysses_sequence_parallel_size": sequence,
                    f"{_ACTOR}.context_parallel_size": context,
                    f"{_ACTOR}.fsdp_config.fsdp_size": shards,
                }
                for role, block in _BLOCKS.items():
                    set_key(variant, f"{block}.enable_resource_pool", False)
                    if role in pools:
                        keys[f"{block}.enable_resource_pool"] = True
                        keys[f"{block}.nnodes"], keys[f"{block}.n_gpus_per_node"] = pools[role]
                settings = tuple(set_key(variant, key, value) for key, value in keys.items())
                yield settings, _describe((nodes, per_node), (tensor, sequence, context), shards, pools), variant


def _pools(cluster: Cluster, roles: tuple[str, ...]) -> Iterator[tuple[Size, dict[str, Size]]]:
    """Yield the sizes of the main pool and of pools for ``roles``: whole nodes if there are enough, else parts of one node."""
    whole = cluster.nodes > len(roles)
    if not whole and cluster.nodes > 1:
        return
    units = cluster.nodes if whole else cluster.per_node
    for sizes in itertools.product(_powers(units), repeat=len(roles)):
        if sum(sizes) < units:
            main, *others = [(size, cluster.per_node) if whole else (1, size) for size in (units - sum(sizes), *sizes)]
            yield main, dict(zip(roles, others, strict=True))


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _describe(main: Size, divided: tuple[int, int, int], shards: int, pools: dict[str, Size]) -> str:
    world, (tensor, sequence, context) = main[0] * main[1], divided
    ranks = world if shards == -1 else shards * tensor
    sizes = {"tensor {}": tensor, "sequence {}": sequence, "context {}": context, "{} copies": world // ranks}
    details = ", ".join(text.format(size) for text, size in sizes.items() if size > 1)
    return (
        f"{'actor' if pools else 'all roles together'} on {main[0]}x{main[1]}, weights over {ranks} "
        f"rank{'s' * (ranks > 1)}{f' ({details})' if details else ''}"
        + "".join(f"; {role} on its own {size[0]}x{size[1]}" for role, size in pools.items())
    )


_SHOWN = 6  # placements to name after the chosen one


def render(plan: Plan) -> str:
    lines = [*_head(plan), ""]
    if plan.placements:
        lines += [*_placement_lines(plan), ""]
    for memory in plan.memories:
        lines += [*_memory_lines(memory, plan), ""]
    return "\n".join([*lines, f"step: {_describe_time(plan.time)}", *_event_lines(plan), "", *_fit_lines(plan)])


DISK = 1e9
"""Bytes per second at which a checkpoint is taken to be written: a local disk."""


def _event_lines(plan: Plan) -> Iterator[str]:
    """Yield what validation and checkpoints add, each with its share of the time between two of them."""
    trainer, validation, size = plan.config.trainer, plan.validation, plan.checkpoint
    if validation is not None:
        answers, seconds = validation
        steps = _every(trainer.test_freq)
        share = seconds / (seconds + steps * plan.time.total)
        yield f"validation: {_seconds(seconds)} for {answers} answers every {steps} steps, {share:.0%} of the time"
    if steps := _every(trainer.save_freq):
        yield f"checkpoint: {_size(size)} every {steps} steps, written in {_seconds(size / DISK)} at 1 GB/s while training continues"


def _every(frequency: int | str) -> int:
    """Return the steps between two events; 0 for none, and for those of an epoch."""
    return max(0, frequency) if isinstance(frequency, int) else 0


def validation_rows(config: RLConfig) -> int:
    """Return the prompts of a validation; 0 without files, or where one is not a Parquet file of this machine."""
    import pyarrow.parquet as pq

    files = config.data.val_files
    paths = [Path(file) for file in ([files] if isinstance(files, str) else files or [])]
    if not all(path.suffix == ".parquet" and path.is_file() for path in paths):
        return 0
    try:
        rows = sum(pq.read_metadata(path).num_rows for path in paths)
    except (OSError, ValueError):  # ValueError: no Parquet; the checks of the data say so
        return 0
    return rows if config.data.val_max_samples < 0 else min(rows, config.data.val_max_samples)


def describe_phase(phase: Phase) -> str:
    """Return ``update 12.3 GiB = activations 8.3 + weights 4.0``, the largest part first."""
    parts = sorted(phase.parts.items(), key=lambda part: -part[1])
    return f"{phase.name} {_size(phase.total)} = " + " + ".join(f"{name} {_size(count)}" for name, count in parts)


def run_settings(placement: Placement) -> list[str]:
    """Return the overrides that make a placement and let it fit."""
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    knobs = [setting for knob in placement.fitting.knobs for setting in knob.setting.split(" ")]
    others = [setting for setting in knobs if not setting.startswith(key)]
    return [*placement.settings, *others, f"{key}={placement.fitting.largest_budget}"]


def _describe_time(time: StepTime) -> str:
    stages = {name.replace("_", "-"): value for name, value in time._asdict().items() if value > 0.0005 * time.total}
    return f"{_seconds(time.total)} = " + " + ".join(f"{name} {_seconds(value)}" for name, value in stages.items())


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 100 else f"{value:.2g} s"


def _head(plan: Plan) -> Iterator[str]:
    work, device, bf16 = plan.work, plan.device, plan.work.actor.bf16
    shape, rank, (dtype, source) = work.actor.shape, work.actor.lora_rank, dtype_of(plan)
    yield (
        f"model: {shape.kind}, {shape.parameters / 1e9:.3g} billion parameters, {shape.layers} layers of width {shape.hidden}"
        + (f", {shape.experts} experts, {shape.chosen} per token" if shape.experts else "")
        + (f", rank-{rank} adapters trained" if rank else "")
        + (f", layers in {int(8 * work.actor.packed)} bits" if work.actor.packed else "")
    )
    yield (
        f"device: {device.name}, {_size(device.memory)}, {device.rate(bf16=bf16) / 1e12:.3g} TFLOP/s in "
        f"{'bfloat16' if bf16 else 'float32'} matmuls, {device.bandwidth / 1e9:.3g} GB/s"
    )
    yield f"dtype: {dtype} ({source})"
    yield f"work: {work.batch} prompts x {work.samples} sequences of up to {work.prompt} + {work.response} tokens a step"
    if work.activation_scale != 1:
        yield f"activations: measured with one micro-batch, {work.activation_scale - 1:+.0%} against the estimate"


def _memory_lines(memory: Memory, plan: Plan) -> Iterator[str]:
    pool, peak, work = memory.pool, memory.peak, plan.work
    where = f" on {pool.nodes}x{pool.per_node}" if pool.world > 1 else ""
    yield (
        f"{pool.name}{where}: {', '.join(pool.roles)}; {'fits' if peak.total <= plan.limit else 'does not fit'}: "
        f"{_size(peak.total)} in {peak.name}, {peak.total / plan.device.memory:.0%} of {_size(plan.device.memory)}"
    )
    names = dict.fromkeys(name for phase in memory.phases for name in phase.parts)
    rows = [["phase", *(phase.name for phase in memory.phases)]]
    rows += [
        [name, *(_size(phase.size(name)) if phase.size(name) else "" for phase in memory.phases)] for name in names
    ]
    rows.append(["total", *(_size(phase.total) for phase in memory.phases)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  " + "  ".join([name.ljust(widths[0]), *padded]).rstrip()
    if work.rollout is not None and "rollout" in pool.roles and uses_pages(work, pool):
        held, wanted = rows_at_once(work, pool, plan.device), math.ceil(work.batch * work.samples / pool.world)
        wanted = min(work.rollout.max_num_seqs, wanted)
        some = f"{held} of {wanted} sequences of full length are decoded at once; shorter ones leave space for more"
        yield f"  KV cache: {some if held < wanted else f'all {wanted} sequences are decoded at once'}"


def _fit_lines(plan: Plan) -> Iterator[str]:
    fitting = plan.fitting
    if plan.placements:
        if fitting.fits:
            yield from ("run it with:", *(f"  {setting}" for setting in run_settings(plan.placements[0])))
        return
    if plan.fits:
        key = budget_key(plan.config).rpartition(".")[2]
        yield f"largest micro-batch that fits: {key}={fitting.largest_budget} tokens"
    else:
        yield "to make it fit, in this order:" if fitting.knobs else "no key makes it fit:"
        for knob in fitting.knobs:
            yield f"  {knob.setting}  saves {_size(knob.saved)}, leaves {_size(knob.peak)}"
    if fitting.faster is not None:
        yield f"fits too, and takes less time: {fitting.faster}"
    if not fitting.fits:
        peak, rl = fitting.fullest.peak, isinstance(plan.config, RLConfig)
        more = "more devices (tensor_model_parallel_size, trainer.n_gpus_per_node), " if rl else ""
        yield f"  still {_size(peak.total - plan.limit)} too much in {describe_phase(peak)}: {more}shorter responses or a smaller model"


def _placement_lines(plan: Plan) -> Iterator[str]:
    best, *rest = plan.placements
    fitting = [placement for placement in plan.placements if placement.fitting.fits]
    yield f"{len(plan.placements)} placements compared, {len(fitting)} of them fit"
    if not best.fitting.fits:
        yield f"nearest: {_reason(best, best, plan)}"
        return
    yield f"chosen: {best.words}: {_describe_time(best.time)}"
    first = {best.words: best}
    for placement in rest:
        first.setdefault(placement.words, placement)
    others = list(first.values())[1 : 1 + _SHOWN]
    refused = [placement for placement in rest if not placement.fitting.fits]
    for placement in others + (refused[:1] if len(fitting) > _SHOWN else []):
        yield f"  {_reason(placement, best, plan)}"


def _reason(placement: Placement, best: Placement, plan: Plan) -> str:
    """Return the reason against a placement, with numbers, and the placement."""
    peak, time = placement.fitting.fullest.peak, placement.time
    if not placement.fitting.fits:
        return f"short by {_size(peak.total - plan.limit)} in {describe_phase(peak)}: {placement.words}"
    slower = time.total - best.time.total
    if slower < 0.005 * best.time.total:
        return f"as fast ({_seconds(time.total)}) and not simpler: {placement.words}"
    gap, stage = max((now - then, name) for name, now, then in zip(time._fields, time, best.time, strict=True))
    return f"slower by {_seconds(slower)} ({stage.replace('_', '-')} +{_seconds(gap)}): {placement.words}"


_OPERATIONS = 28  # operations of a layer in a decode step on a CPU
_GRAPH_SECONDS = 24e-6  # least seconds of a layer in a decode step on a GPU: 12 kernels of a CUDA graph
_LOGIT_BYTES = 40  # bytes that sampling reads and writes per logit


class StepTime(NamedTuple):
    """Seconds of each stage; the stages of a step follow one another."""

    generation: float
    log_probs: float
    update: float
    messages: float

    @property
    def total(self) -> float:
        return sum(self)

    def as_json(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in {**self._asdict(), "total": self.total}.items()}


def step_time(work: Work, device: Device) -> StepTime:
    """Estimate a step: the prompts of a batch are answered and scored, and the models updated."""
    generation = log_probs = update = messages = 0.0
    for role, model in (("actor", work.actor), ("critic", work.critic)):
        if model is not None:
            pool = work.pool_of(role)
            update += _update(work, model, pool, device)
            messages += _messages(work, model, pool, device)
    scored = {"critic": work.critic, "actor": work.actor if work.old_log_probs else None}
    for role, model in {**scored, "reference": work.actor if work.reference else None}.items():
        log_probs += _forward(work, model, work.pool_of(role), device) if model is not None else 0.0
    log_probs += sum(_forward(work, teacher, work.pool_of("teacher"), device) for teacher in work.teachers)
    if work.rollout is not None:
        engines = work.pool_of("rollout")
        generation = _generation(work, engines, device)
        if work.served or engines.divided or engines is not work.main:  # engines with a copy of the weights
            other_node = engines is not work.main and work.main.nodes + engines.nodes > 2
            size = 2 if work.rollout_bf16 else 4
            messages += size * work.actor.shape.parameters / (device.network if other_node else device.link)
    return StepTime(generation, log_probs, update, messages)


def _tokens(work: Work, rows: int) -> int:
    return rows * work.response + math.ceil(rows / work.samples) * work.prompt


def _rank_rows(work: Work, pool: Pool) -> int:
    return math.ceil(work.batch * work.samples / pool.layout.dp_size)


def _computing(work: Work, model: TrainedModel, pool: Pool, device: Device) -> float:
    """Return the seconds of one rank's matmuls and attention in a forward pass over the batch."""
    shape, rows, longest = model.shape, _rank_rows(work, pool), work.prompt + work.response
    matmuls = shape.multiplications * _tokens(work, rows)
    matmuls += 0 if model.value else shape.embedding * rows * work.response
    pairs = rows * (longest**2 - work.prompt**2 * (1 - 1 / work.samples)) / 2
    operations = 2 * matmuls + 4 * pairs * shape.queries * shape.layers
    return operations / pool.layout.ranks_a_shard / device.rate(bf16=model.bf16)


def _layer_tokens(work: Work, model: TrainedModel, pool: Pool) -> float:
    return model.shape.layers * _tokens(work, _rank_rows(work, pool)) / pool.layout.ranks_a_row


def _forward(work: Work, model: TrainedModel, pool: Pool, device: Device) -> float:
    moved = _layer_tokens(work, model, pool) * work.passes(model, pool).forward_peak
    return _computing(work, model, pool, device) + moved / device.bandwidth


def _update(work: Work, model: TrainedModel, pool: Pool, device: Device) -> float:
    """Return the seconds of all passes, of the optimizer's steps, and of what moves to and from the host's memory."""
    passes, tokens, shards = work.passes(model, pool), _layer_tokens(work, model, pool), shards_of(pool)
    steps, trained = max(1, work.batch // model.mini_batch) * model.epochs, model.trained_parameters / shards
    state = state_bytes(model) / shards
    stepping = steps * 2 * (8 * trained + state) / device.bandwidth
    to_host, fsdp = 2 * model.epochs * tokens * passes.layer_kept * passes.on_host, pool.parallel.fsdp_config
    if pool.divided and (fsdp.param_offload or fsdp.offload_policy):
        to_host += 2 * (steps + 1) * model.shape.parameters / shards * 4
    if pool.divided and (fsdp.optimizer_offload or fsdp.offload_policy):
        to_host += 2 * steps * state
    # a backward pass is two forward passes; frozen matrices have no gradient, checkpointing repeats the forward pass
    computed = (3 + model.checkpointing - bool(model.lora_rank)) * _computing(work, model, pool, device)
    moved = 3 * tokens * (passes.forward_peak if model.checkpointing else passes.layer_kept)
    seconds = model.epochs * (computed + moved / device.bandwidth) + stepping
    return seconds + (to_host / device.host if device.host else 0.0)


def _generation(work: Work, pool: Pool, device: Device) -> float:
    """Return the seconds of the prompts and of decode steps: matmuls, or reading weights and cache, then sampling."""
    shape, rollout = work.actor.shape, work.rollout
    assert rollout is not None
    sequences, tensor, rows = math.ceil(work.batch * work.samples / pool.world), 1, rows_at_once(work, pool, device)
    if work.served and work.spec is not None:
        together = engine_devices(work.spec.config) // rollout.data_parallel_size  # workers of one copy of the model
        sequences *= together
        tensor = together if work.on_cpu else rollout.tensor_model_parallel_size
        rows = (rollout.num_replicas or 1) * served_rows(work, device.memory, device.overhead)
    rate, rounds = device.rate(bf16=work.rollout_bf16), math.ceil(sequences / rows)
    rows = sequences / rounds
    prompts = 2 * shape.multiplications * math.ceil(sequences / work.samples) * work.prompt / rate
    steps = rounds * work.response
    matrices = shape.multiplications + shape.embedding
    cached = rows * work.response / 2 + math.ceil(rows / work.samples) * work.prompt
    read = matrices * (2 if work.rollout_bf16 else 4) + cached * token_bytes(work)
    decode = max(2 * rows * matrices / rate, read / device.bandwidth) / tensor
    layer = _OPERATIONS * device.launch if device.on_cpu else _GRAPH_SECONDS
    return steps * (decode + rows * shape.vocabulary * _LOGIT_BYTES / device.bandwidth + shape.layers * layer) + prompts


def rows_at_once(work: Work, pool: Pool, device: Device) -> int:
    return cache_shape(work, pool, cache_space(work, pool, device.overhead, device.memory)).rows


def _messages(work: Work, model: TrainedModel, pool: Pool, device: Device) -> float:
    """Return the seconds of messages: parameters and gradients (FSDP), activations (tensor, sequence and context parallelism)."""
    if not pool.divided:
        return 0.0
    layout, shape, size = pool.layout, model.shape, 2 if model.bf16 else 4
    steps = max(1, work.batch // model.mini_batch) * model.epochs
    micro = work.micro_batch(model, pool)
    passes, shard = micro.per_update * steps, layout.dp_shard * layout.ranks_a_row
    speed = device.link if shard * layout.tensor <= pool.per_node else device.network
    gathers = passes * (2 if pool.parallel.fsdp_config.reshard_after_forward else 1) + micro.per_update
    seconds = shape.parameters / layout.tensor * (shard - 1) / shard * (gathers * size + 4 * passes) / speed
    if layout.dp_replicate > 1:
        seconds += shape.parameters / layout.tensor / shard * 8 * steps / device.network
    layer_tokens = micro.tokens * passes * shape.layers
    if layout.tensor > 1:
        reduced = 2 * shape.hidden * size * (layout.tensor - 1) / layout.tensor
        seconds += 6 * layer_tokens * reduced / device.link
    layer_tokens /= layout.ranks_a_row * layout.tensor
    if layout.sequence > 1:
        seconds += 3 * layer_tokens * 8 * (shape.queries + shape.keys) / device.link
    if layout.context > 1:  # keys and values go round in both passes, their float32 gradients in the second
        blocks = (layout.context - 1) * 2 * size * 2 + layout.context * 2 * 4
        seconds += layer_tokens * blocks * shape.keys / device.link
    return seconds
