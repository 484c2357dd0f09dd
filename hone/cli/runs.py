"""`hone runs`: list, show, compare and bisect runs from their directories, and print sheets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.apps.lab.compare import (
    Run,
    Summary,
    config_differences,
    find_run,
    flatten,
    headline_metrics,
    require_metrics,
    run_names,
    summarise,
    whole_runs,
)
from hone.cli import run_control, run_records
from hone.cli.options import RUNS, Json, Png, Root, RunName, new_group
from hone.cli.output import (
    CHARTS,
    draw_curves,
    new_console,
    new_table,
    number,
    overview,
    print_chart,
    print_json,
    print_plain,
)
from hone.errors import HoneError
from hone.insight.run_files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from hone.apps.lab.confidence import ArmComparison
    from hone.apps.lab.divergence import Bisection, Divergence


app = new_group(
    "List, show, compare, diagnose and bisect runs, print sheets and samples, and change the number of engines."
)

_HIGHLIGHTS = (
    "actor_rollout_ref.model.path", "model.path", "actor_rollout_ref.model.lora_rank", "algorithm.adv_estimator",
    "data.train_files", "data.train_batch_size", "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.actor.optim.lr", "optim.lr", "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward", "critic.enable", "trainer.seed",
)  # fmt: skip

for _command in (
    *(run_records.alerts, run_records.diagnose, run_records.samples, run_records.coverage, run_records.triage),
    *(run_control.engines, run_control.prune),
):
    app.command()(_command)


@app.command("list")
def list_runs(root: Root = RUNS, as_json: Json = False) -> None:
    """List the runs below a folder, oldest first."""
    if not root.is_dir():
        raise HoneError(f"no folder '{root}'", fix="--root DIR with the run directories", code="E-runs")
    rows = [overview(run) for run in whole_runs(run_names(root))]
    if as_json:
        print_json(rows)
        return
    table = new_table("run", "status", "steps>", "reward>", "loss>", "started", "duration>")
    for row in rows:
        cells = (
            row["name"],
            row["status"],
            str(row["steps"]),
            "" if row["last_reward"] is None else f"{row['last_reward']:.3f}",
            "" if row["last_loss"] is None else f"{row['last_loss']:.3f}",
            _when(row["started"]),
            _duration(row["seconds"]),
        )
        table.add_row(*cells)
    new_console().print(table if rows else f"no runs under {root}")


@app.command("show")
def show(
    run: RunName,
    metric: Annotated[list[str] | None, typer.Option("--metric", help="metric to chart; repeat for several")] = None,
    every: Annotated[bool, typer.Option("--all", help="all metrics, not only the main ones")] = False,
    png: Png = None,
    root: Root = RUNS,
    as_json: Json = False,
) -> None:
    """Show one run: status, main settings, main metrics and curves."""
    from hone.insight.curves import points, sparkline

    shown_run = find_run(run, root)
    main = require_metrics(metric, [shown_run]) if metric else headline_metrics([shown_run])
    names = main if metric or not (every or as_json) else shown_run.names()
    if png is not None:
        draw_curves(png, [shown_run], main)
    summaries = {name: summary for name in names if (summary := summarise(shown_run, name))}
    if as_json:
        metrics = {name: vars(summary) for name, summary in summaries.items()}
        print_json(overview(shown_run) | {"config": shown_run.config, "record": shown_run.record, "metrics": metrics})
        return
    console = new_console()
    _print_head(console, shown_run)
    table = new_table("metric", "first>", "last>", "best>", "at step>", "curve")
    room = max(8, min(30, console.width - max(map(len, summaries), default=0) - 52))
    for name, summary in summaries.items():
        step = "" if summary.best_step is None else str(summary.best_step)
        numbers = (number(summary.first), number(summary.last), number(summary.best), step)
        table.add_row(name, *numbers, sparkline(points(shown_run.metrics, name), room))
    console.print(table if summaries else "no metrics yet")
    if (more := len(shown_run.names()) - len(names)) and not metric:
        print_plain(console, f"{more} more metrics: --all, or --metric NAME")
    for name in metric or main[:CHARTS]:
        print_chart(console, name, [shown_run])
    if png is not None:
        print_plain(console, f"wrote {png}")


# output --------------------------------------------------------------------------------------------------------------


def _print_head(console: Console, run: Run) -> None:
    reason = run.record.get("exit_reason")
    hardware = run.record.get("hardware") or {}
    facts = {
        "status": run.status + (f": {reason}" if reason else ""),
        "started": f"{_when(run.record.get('started'))}, {_duration(run.seconds) or 'unknown duration'}",
        "steps": str(run.steps),
        "seed": str(run.record.get("seed", "")),
        "machine": f"{hardware.get('cpu', 'unknown')}, {hardware.get('usable_cores', '?')} cores"
        + "".join(f", {gpu['name']}" for gpu in hardware.get("gpus", [])),
        **_memory(run.record),
        **_webhook(run.record),
        "command": " ".join(run.record.get("command", [])),
        **{
            key: str(run.config[key])
            for key in _HIGHLIGHTS
            if run.config.get(key) is not None and (run.config[key] or not key.endswith("lora_rank"))
        },
    }
    print_plain(console, run.name, style="bold")
    width = max(map(len, facts))
    for key, value in facts.items():
        print_plain(console, f"  {key:<{width}}  {value}")


def _memory(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the predicted and measured memory of each process, without that of the bare process."""
    facts = {}
    for name, held in record.get("memory", {}).items():
        on_device = "device_peak" in held
        measured = held["device_peak"] if on_device else held["peak"] - held["bare"]
        text = f"{measured:.2f} GiB measured"
        plan = next((pool for pool in record.get("plan", []) if pool["pool"] == name.partition("[")[0]), None)
        if plan is not None and measured:
            ratio = plan["peak_gib"] / measured
            text += f"; predicted {plan['peak_gib']:.2f} GiB ({plan['peak_phase']}), {ratio:.1f} times as much"
        if not on_device:
            text += f"; besides {held['bare']:.2f} GiB of the process without a model"
        facts[f"memory of {name}"] = text
    return facts


def _webhook(record: Mapping[str, Any]) -> dict[str, str]:
    """Return how many notices the webhook took; nothing for a run without one."""
    counts = record.get("webhook")
    if not counts:
        return {}
    failed = f", {counts['failed']} failed: {counts['error']}" if counts["failed"] else ""
    return {"webhook": f"{counts['delivered']} notices delivered{failed}"}


def _when(started: Any) -> str:
    return str(started or "")[:16].replace("T", " ")


def _duration(seconds: float | None) -> str:
    from hone.insight.trackers.console import clock

    return "" if seconds is None else clock(seconds)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="two or more runs: directories, or names below the root")],
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", "--metrics", help="metric to compare; repeat for several, or separate them by commas"),
    ] = None,
    level: Annotated[float, typer.Option("--level", help="level of the intervals", min=0.5, max=0.999)] = 0.95,
    effect: Annotated[
        float | None,
        typer.Option("--effect", help="difference to find, for the number of seeds; default: the observed one"),
    ] = None,
    png: Png = None,
    root: Root = RUNS,
    as_json: Json = False,
) -> None:
    """Compare runs: differences of their configurations, metrics, and which differences are more than noise.

    Runs with equal configurations apart from the seed form an arm. Each arm is compared with the first, paired by seed and
    prompt.
    """
    from hone.apps.lab.confidence import Unpaired, compare_arms, scores_in_common

    if len(runs) < 2:
        raise HoneError(f"{len(runs)} run to compare", fix="give two or more: hone runs compare A B", code="E-runs")
    compared = [find_run(name, root) for name in runs]
    chosen = [name.strip() for names in metrics or () for name in names.split(",") if name.strip()]
    names = require_metrics(chosen, compared) or headline_metrics(compared)
    differences = config_differences(compared)
    measured = [scores_in_common(compared, metric) for metric in chosen or [None]]
    results: list[ArmComparison] = []
    unpaired = ""
    for scores in measured:
        try:
            results += compare_arms(compared, scores, level=level, effect=effect) if scores is not None else []
        except Unpaired as problem:
            unpaired = f"{problem.what}; {problem.fix}"
    if png is not None:
        draw_curves(png, compared, names)
    if as_json:
        summaries = {
            name: {run.name: vars(summary) for run in compared if (summary := summarise(run, name))} for name in names
        }
        record = {"runs": [overview(run) for run in compared], "config": differences, "metrics": summaries}
        confidence = [result.record() for result in results]
        print_json(record | {"confidence": confidence, "unpaired": unpaired, "png": str(png) if png else None})
        return
    console = new_console()
    labels = [run.name for run in compared]
    table = new_table("config key", *labels)
    for key, values in differences.items():
        table.add_row(key, *map(str, values))
    console.print(table if differences else "the configs are equal")
    table = new_table("metric: last (best)", *(f"{label}>" for label in labels))
    for name in names:
        cells = [summarise(run, name) for run in compared]
        table.add_row(name, *(_last_and_best(cell) if cell else "" for cell in cells))
    console.print(table if names else "no metrics in common to compare; name them with --metrics")
    print_confidence(console, results)
    if unpaired:
        print_plain(console, unpaired)
    for name in chosen or names[:CHARTS]:
        print_chart(console, name, compared)
    if png is not None:
        print_plain(console, f"wrote {png}")


def _last_and_best(summary: Summary) -> str:
    best = "" if summary.best is None else f" ({number(summary.best)})"
    return number(summary.last) + best


def print_confidence(console: Console, results: Sequence[ArmComparison]) -> None:
    """Print each comparison of two arms in words, and what limits it."""
    for item in results:
        for line in confidence_lines(item):
            print_plain(console, line)


def confidence_lines(item: ArmComparison) -> list[str]:
    """Return the difference of two arms, its interval, the verdict, and what the interval leaves out, one a line."""
    result = item.result
    size = f"{result.seeds} seed{'s' * (result.seeds != 1)} x {result.prompts} prompt{'s' * (result.prompts != 1)}"
    lines = [
        f"{_arm(item.second)} (second) against {_arm(item.first)} (first), {item.score}:",
        f"  {number(result.first)} -> {number(result.second)}, difference {result.difference:+.4g}, {size}",
    ]
    if not math.isnan(result.low):
        lines.append(f"  {result.level:.0%} interval {result.low:+.4g} to {result.high:+.4g}: {result.verdict}")
    if result.seeds_needed is not None:
        lines.append(f"  seeds needed to find this difference with 80 % power: {result.seeds_needed}")
    return lines + [f"  {line}" for line in item.limits]


def _arm(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


_LONG = 60


@app.command()
def bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="a run that is right")],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="a run that should have been like it")],
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", help="relative difference of numbers that counts as none; on GPUs 1e-3", min=0),
    ] = 0.0,
    root: Root = RUNS,
    as_json: Json = False,
) -> None:
    """Find the first thing that differs between two runs, with step, sample and likely cause.

    Compared are, in this order: config, data, prompt order, tokens, log-probs, rewards, advantages, micro-batches, loss, weights.
    Steps without stored samples are compared by their metrics; trainer.rollout_dump_freq=1 stores all.
    """
    from hone.apps.lab.divergence import bisect_runs, read_trace

    runs = [find_run(name, root) for name in (good, bad)]
    traces = [read_trace(run) for run in runs]
    result = bisect_runs(*traces, tolerance=tolerance)
    if not result.steps and not result.config:
        raise HoneError(
            f"{runs[0].name} and {runs[1].name} have no step in common",
            fix="name two runs that have trained at least one step",
            code="E-runs",
        )
    if as_json:
        print_json(vars(result) | {name: _plain(getattr(result, name)) for name in ("first", "observed")})
        return
    for line in bisection_lines(result):
        typer.echo(line)


def _plain(item: Divergence | None) -> dict[str, Any] | None:
    return None if item is None else vars(item)


def bisection_lines(result: Bisection) -> list[str]:
    compared = f"{len(result.steps)} steps in common, {result.with_samples} with samples of both runs"
    if result.first is None:
        lines = [f"no difference: {compared}"]
        return lines + [f"  {name}: {_pair(*pair)}" for name, pair in result.circumstances.items()]
    lines = [f"first difference: {_divergence(result.first)}"]
    lines += [f"  also {key}: {_pair(*pair)}" for key, pair in list(result.config.items())[1:]]
    if result.first is not result.observed:
        effect = "none in what both runs recorded" if result.observed is None else _divergence(result.observed)
        lines.append(f"first effect: {effect}")
    lines.append(f"likely cause: {result.cause}")
    lines.append(f"compared: {compared}")
    return lines


def _divergence(item: Divergence) -> str:
    where = [str(item.stage)]
    where += [] if item.step is None else [f"step {item.step}"]
    where += [] if item.sample is None else [f"sample {item.sample}"]
    return f"{', '.join(where)}: {item.what}: {_pair(item.good, item.bad)}"


def _pair(good: Any, bad: Any) -> str:
    return f"{_short(good)} -> {_short(bad)}"


def _short(value: Any) -> str:
    text = f"{value:.8g}" if isinstance(value, float) else "absent" if value is None else str(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


@app.command()
def note(
    run: RunName,
    text: Annotated[str, typer.Argument(help="what to remember")],
    root: Root = RUNS,
) -> None:
    """Add a note to a run; its sheet shows it."""
    from hone.apps.lab.run_sheet import NOTES, add_note

    path = find_run(run, root).path
    add_note(path, text)
    typer.echo(f"wrote {path / NOTES}")


@app.command()
def sheet(
    run: RunName,
    base: Annotated[
        str | None, typer.Option("--base", help="run to compare with; default: the defaults of the keys")
    ] = None,
    metric: Annotated[str | None, typer.Option("--metric", help="metric of curve and verdict")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="file to write; default: print")] = None,
    png: Png = None,
    root: Root = RUNS,
) -> None:
    """Write one page on a run in Markdown: configuration difference, curve, notes, verdict."""
    import os

    from hone.apps.lab import run_sheet
    from hone.apps.lab.confidence import compare_pair, scores_in_common

    shown = find_run(run, root)
    compared = find_run(base, root) if base else None
    if metric is not None:
        require_metrics([metric], [shown])
    verdict = None
    if compared is not None:
        scores = scores_in_common([compared, shown], metric)
        verdict = None if scores is None else compare_pair(compared, shown, scores)
    picture = None
    if png is not None:
        draw_curves(png, [shown], [metric] if metric else headline_metrics([shown])[:1])
        picture = os.path.relpath(png, out.parent if out else Path.cwd())
    page = run_sheet.sheet(
        shown,
        compared.name if compared else "the defaults",
        compared.config if compared else _defaults(shown),
        metric=metric,
        verdict=verdict,
        notes=run_sheet.read_notes(shown.path),
        picture=picture,
    )
    if out is None:
        typer.echo(page, nl=False)
    else:
        write_atomically(out, page)
        typer.echo(f"wrote {out}")


def _defaults(run: Run) -> dict[str, Any]:
    """Return the defaults of the tree that has the most keys of a run's configuration."""
    from omegaconf import OmegaConf

    from hone.config.trees import TREES

    trees = [dict(flatten(OmegaConf.to_container(OmegaConf.structured(tree), resolve=True))) for tree in TREES.values()]
    return max(trees, key=lambda defaults: len(defaults.keys() & run.config.keys()))
