"""A plan as text: sentences and tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hone.config.tree import RLConfig
from hone.preflight.plan.devices import GIB
from hone.preflight.plan.engines import uses_pages
from hone.preflight.plan.fit import Fitting, budget_key
from hone.preflight.plan.memory import Memory, Phase
from hone.preflight.plan.plan import Plan, dtype_of
from hone.preflight.plan.search import Placement
from hone.preflight.plan.step_time import StepTime, rows_at_once

_SHOWN = 6
_STAGES = {"generation": "generation", "log_probs": "log-probs", "update": "update", "messages": "messages"}


def render(plan: Plan) -> str:
    """Return the whole plan."""
    lines = [*_head(plan), ""]
    if plan.placements:
        lines += [*_placement_lines(plan), ""]
    for memory in plan.memories:
        lines += [*_memory_lines(memory, plan), *_rows_lines(memory, plan), ""]
    return "\n".join([*lines, f"step: {describe_time(plan.time)}", "", *_fit_lines(plan)])


def describe_phase(phase: Phase) -> str:
    """Return ``update 12.3 GiB = activations 8.3 + weights 4.0``, the largest part first."""
    parts = sorted(phase.parts.items(), key=lambda part: -part[1])
    return f"{phase.name} {size(phase.total)} = " + " + ".join(f"{name} {size(count)}" for name, count in parts)


def describe_time(time: StepTime) -> str:
    """Return ``12.3 s = generation 6 + log-probs 2 + update 4``."""
    stages = ((words, getattr(time, name)) for name, words in _STAGES.items())
    shown = " + ".join(f"{words} {seconds(value)}" for words, value in stages if value > 0.0005 * time.total)
    return f"{seconds(time.total)} = {shown}"


def size(count: float) -> str:
    """Return bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def seconds(value: float) -> str:
    """Return a time for people."""
    return f"{value:.0f} s" if value >= 100 else f"{value:.2g} s"


def run_settings(placement: Placement) -> list[str]:
    """Return the overrides that make a placement and let it fit."""
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    knobs = [setting for knob in placement.fitting.knobs for setting in knob.setting.split(" ")]
    others = [setting for setting in knobs if not setting.startswith(key)]
    return [*placement.settings, *others, f"{key}={placement.fitting.largest_budget}"]


def _head(plan: Plan) -> Iterator[str]:
    work, device, bf16 = plan.work, plan.device, plan.work.actor.bf16
    shape, rank = work.actor.shape, work.actor.lora_rank
    yield (
        f"model: {shape.kind}, {shape.parameters / 1e9:.3g} billion parameters, {shape.layers} layers of width {shape.hidden}"
        + (f", {shape.experts} experts, {shape.chosen} per token" if shape.experts else "")
        + (f", rank-{rank} adapters trained" if rank else "")
    )
    yield (
        f"device: {device.name}, {size(device.memory)}, {device.rate(bf16=bf16) / 1e12:.3g} TFLOP/s in "
        f"{'bfloat16' if bf16 else 'float32'} matmuls, {device.bandwidth / 1e9:.3g} GB/s"
    )
    dtype, source = dtype_of(plan)
    yield f"dtype: {dtype} ({source})"
    yield f"work: {work.batch} prompts x {work.samples} sequences of up to {work.prompt} + {work.response} tokens a step"
    if work.activation_scale != 1:
        yield f"activations: measured with one micro-batch, {work.activation_scale - 1:+.0%} against the estimate"


def _memory_lines(memory: Memory, plan: Plan) -> Iterator[str]:
    pool, peak = memory.pool, memory.peak
    where = f" on {pool.nodes}x{pool.per_node}" if pool.world > 1 else ""
    yield (
        f"{pool.name}{where}: {', '.join(pool.roles)}; {'fits' if peak.total <= plan.limit else 'does not fit'}: "
        f"{size(peak.total)} in {peak.name}, {peak.total / plan.device.memory:.0%} of {size(plan.device.memory)}"
    )
    names = dict.fromkeys(name for phase in memory.phases for name in phase.parts)
    rows = [["phase", *(phase.name for phase in memory.phases)]]
    rows += [[name, *(size(phase.size(name)) if phase.size(name) else "" for phase in memory.phases)] for name in names]
    rows.append(["total", *(size(phase.total) for phase in memory.phases)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  " + "  ".join([name.ljust(widths[0]), *padded]).rstrip()


def _rows_lines(memory: Memory, plan: Plan) -> Iterator[str]:
    """Say how many sequences the native engine's pages hold, where that is fewer than a step has."""
    work, rollout = plan.work, plan.work.rollout
    if rollout is not None and "rollout" in memory.pool.roles and uses_pages(work, memory.pool):
        rows = rows_at_once(work, memory.pool, plan.device)
        wanted = min(rollout.max_num_seqs, math.ceil(work.batch * work.samples / memory.pool.world))
        held = f"{rows} of {wanted} sequences of full length are decoded at once; shorter ones leave space for more"
        yield f"  KV cache: {held if rows < wanted else f'all {wanted} sequences are decoded at once'}"


def _fit_lines(plan: Plan) -> Iterator[str]:
    fitting = plan.fitting
    if plan.placements:
        if fitting.fits:
            yield "run it with:"
            yield from (f"  {setting}" for setting in run_settings(plan.placements[0]))
        return
    if plan.fits:
        key = budget_key(plan.config).rpartition(".")[2]
        yield f"largest micro-batch that fits: {key}={fitting.largest_budget} tokens"
        yield from _faster_lines(fitting)
        return
    yield "to make it fit, in this order:" if fitting.knobs else "no key makes it fit:"
    for knob in fitting.knobs:
        yield f"  {knob.setting}  saves {size(knob.saved)}, leaves {size(knob.peak)}"
    yield from _faster_lines(fitting)
    if not fitting.fits:
        peak = fitting.fullest.peak
        more = "more devices (tensor_model_parallel_size, trainer.n_gpus_per_node), "
        more = more if isinstance(plan.config, RLConfig) else ""
        yield f"  still {size(peak.total - plan.limit)} too much in {describe_phase(peak)}: {more}shorter responses or a smaller model"


def _faster_lines(fitting: Fitting) -> Iterator[str]:
    if fitting.faster is not None:
        yield f"fits too, and takes less time: {fitting.faster}"


def _placement_lines(plan: Plan) -> Iterator[str]:
    best, *rest = plan.placements
    fitting = [placement for placement in plan.placements if placement.fitting.fits]
    yield f"{len(plan.placements)} placements compared, {len(fitting)} of them fit"
    if not best.fitting.fits:
        yield f"nearest: {_reason(best, best, plan)}"
        return
    yield f"chosen: {best.words}: {describe_time(best.time)}"
    first_of_words = {placement.words: placement for placement in reversed(rest) if placement.words != best.words}
    others = sorted(first_of_words.values(), key=rest.index)[:_SHOWN]
    refused = [placement for placement in rest if not placement.fitting.fits]
    for placement in others + (refused[:1] if len(fitting) > _SHOWN else []):
        yield f"  {_reason(placement, best, plan)}"


def _reason(placement: Placement, best: Placement, plan: Plan) -> str:
    """Return the reason against a placement, with numbers, and the placement."""
    peak = placement.fitting.fullest.peak
    if not placement.fitting.fits:
        return f"short by {size(peak.total - plan.limit)} in {describe_phase(peak)}: {placement.words}"
    gaps = {words: getattr(placement.time, name) - getattr(best.time, name) for name, words in _STAGES.items()}
    stage = max(gaps, key=lambda name: gaps[name])
    slower = placement.time.total - best.time.total
    if slower < 0.005 * best.time.total:
        return f"as fast ({seconds(placement.time.total)}) and not simpler: {placement.words}"
    return f"slower by {seconds(slower)} ({stage} +{seconds(gaps[stage])}): {placement.words}"
