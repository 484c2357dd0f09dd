"""A plan in words and tables."""

from __future__ import annotations

from collections.abc import Sequence

from hone.preflight.plan.memory import Memory
from hone.preflight.plan.parts import Phase
from hone.preflight.plan.plan import Plan
from hone.preflight.plan.search import Placement
from hone.preflight.plan.step_time import StepTime

GIB = 2**30
_SHOWN = 6


def render(plan: Plan) -> str:
    """The whole plan, for a terminal."""
    lines = [_head(plan), ""]
    if plan.placements:
        lines += [*_placement_lines(plan), ""]
    for memory in plan.memories:
        lines += [*_memory_lines(memory, plan), ""]
    lines += [f"step: {describe_time(plan.time)}", ""]
    return "\n".join([*lines, *_fit_lines(plan)])


def describe_phase(phase: Phase) -> str:
    """``update 12.3 GiB = weights 4.0 + activations 8.3``, the largest first."""
    parts = sorted(phase.parts, key=lambda part: -part.size)
    return f"{phase.name} {size(phase.total)} = " + " + ".join(f"{part.name} {size(part.size)}" for part in parts)


def describe_time(time: StepTime) -> str:
    """``12.3 s = generation 6 + log-probs 2 + update 4``."""
    stages = {
        "generation": time.generation,
        "log-probs": time.log_probs,
        "update": time.update,
        "messages": time.messages,
    }
    shown = " + ".join(f"{name} {seconds(value)}" for name, value in stages.items() if value > 0.0005 * time.total)
    return f"{seconds(time.total)} = {shown}"


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def seconds(value: float) -> str:
    """A time for people."""
    return f"{value:.0f} s" if value >= 100 else f"{value:.2g} s"


def _head(plan: Plan) -> str:
    shape, work, device = plan.work.actor.shape, plan.work, plan.device
    trained = f", rank-{work.rank} adapters trained" if work.adapters else ""
    experts = f", {shape.experts} experts of which a token meets {shape.chosen}" if shape.experts else ""
    return (
        f"model: {shape.kind}, {shape.parameters / 1e9:.3g} billion parameters, {shape.layers} layers of width "
        f"{shape.hidden}{experts}{trained}\n"
        f"device: {device.name}, {size(device.memory)}, "
        f"{(device.narrow_rate if work.actor.narrow else device.wide_rate) / 1e12:.3g} TFLOP/s in "
        f"{'bfloat16' if work.actor.narrow else 'float32'} products, {device.bandwidth / 1e9:.3g} GB/s\n"
        f"work: {work.batch} prompts x {work.samples} sequences of up to {work.prompt} + {work.response} tokens a step"
    )


def _memory_lines(memory: Memory, plan: Plan) -> list[str]:
    process = memory.process
    rows = [("phase", *(phase.name for phase in memory.phases))]
    names = list(dict.fromkeys(part.name for phase in memory.phases for part in phase.parts))
    for name in names:
        cells = [phase.size(name) for phase in memory.phases]
        rows.append((name, *(size(cell) if cell else "" for cell in cells)))
    rows.append(("total", *(size(phase.total) for phase in memory.phases)))
    share = memory.peak.total / plan.device.memory
    verdict = "fits" if memory.peak.total <= plan.limit else "does not fit"
    where = f" on {process.nodes}x{process.per_node}" if process.world > 1 else ""
    title = f"{process.pool}{where}: {', '.join(process.roles)}"
    return [
        f"{title}; {verdict}: {size(memory.peak.total)} in {memory.peak.name}, {share:.0%} of {size(plan.device.memory)}",
        *_table(rows),
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _fit_lines(plan: Plan) -> list[str]:
    fitting = plan.fitting
    if plan.placements:
        return (
            ["run it with:", *(f"  {setting}" for setting in run_settings(plan.placements[0]))] if fitting.fits else []
        )
    lines = []
    if plan.fits:
        key = "ppo_max_token_len_per_gpu" if plan.work.rollout is not None else "max_token_len_per_gpu"
        lines.append(f"largest micro-batch that fits: {key}={fitting.largest_budget} tokens")
        return lines
    lines.append("to make it fit, in this order:" if fitting.knobs else "no key makes it fit:")
    for knob in fitting.knobs:
        lines.append(f"  {knob.setting}  saves {size(knob.saved)}, leaves {size(knob.peak)}")
    if not fitting.fits:
        fullest = fitting.fullest
        lines.append(
            f"  still {size(fullest.peak.total - plan.limit)} too much in {describe_phase(fullest.peak)}: more devices "
            "(tensor_model_parallel_size, trainer.n_gpus_per_node), shorter responses or a smaller model"
        )
    return lines


def run_settings(placement: Placement) -> list[str]:
    """Overrides that make a placement and let it fit."""
    knobs = [setting for knob in placement.fitting.knobs for setting in knob.setting.split(" ")]
    budget = [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={placement.fitting.largest_budget}"]
    return [*placement.settings, *(k for k in knobs if "ppo_max_token_len_per_gpu" not in k), *budget]


def _placement_lines(plan: Plan) -> list[str]:
    best, *rest = plan.placements
    fitting = [placement for placement in plan.placements if placement.fitting.fits]
    lines = [f"{len(plan.placements)} placements compared, {len(fitting)} of them fit"]
    if not best.fitting.fits:
        return [*lines, f"nearest: {_reason(best, best, plan)}"]
    lines.append(f"chosen: {best.words}: {describe_time(best.time)}")
    shown: list[str] = [best.words]
    for placement in rest:
        if len(shown) > _SHOWN:
            break
        if placement.words not in shown:
            shown.append(placement.words)
            lines.append(f"  not {_reason(placement, best, plan)}")
    refused = [placement for placement in rest if not placement.fitting.fits]
    if refused and len(fitting) > _SHOWN:
        lines.append(f"  not {_reason(refused[0], best, plan)}")
    return lines


def _reason(placement: Placement, best: Placement, plan: Plan) -> str:
    """Why a placement was not chosen, with numbers."""
    fullest = placement.fitting.fullest
    if not placement.fitting.fits:
        over = size(fullest.peak.total - plan.limit)
        return f"{placement.words}: does not fit by {over} in {describe_phase(fullest.peak)}"
    names = {"generation": "generation", "log_probs": "log-probs", "update": "update", "messages": "messages"}
    gaps = {words: getattr(placement.time, name) - getattr(best.time, name) for name, words in names.items()}
    stage = max(gaps, key=lambda name: gaps[name])
    slower = placement.time.total - best.time.total
    if slower < 0.005 * best.time.total:
        return f"{placement.words}: as fast ({seconds(placement.time.total)}), and not simpler"
    return (
        f"{placement.words}: {seconds(placement.time.total)}, slower by {seconds(slower)}, most of it in {stage} "
        f"(+{seconds(gaps[stage])})"
    )
