"""A plan as text: sentences and tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hone.config.tree import RLConfig
from hone.preflight.plan.devices import GIB
from hone.preflight.plan.engines import uses_pages
from hone.preflight.plan.fit import budget_key
from hone.preflight.plan.memory import Memory, Phase
from hone.preflight.plan.plan import Placement, Plan, dtype_of
from hone.preflight.plan.step_time import StepTime, rows_at_once

_SHOWN = 6  # placements to name after the chosen one


def render(plan: Plan) -> str:
    lines = [*_head(plan), ""]
    if plan.placements:
        lines += [*_placement_lines(plan), ""]
    for memory in plan.memories:
        lines += [*_memory_lines(memory, plan), ""]
    return "\n".join([*lines, f"step: {_describe_time(plan.time)}", "", *_fit_lines(plan)])


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
