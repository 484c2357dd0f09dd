"""`hone runs`: list, show and compare runs from their directories, print their samples, and account for their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli import run_coverage, run_engines, run_samples
from hone.cli.run_output import new_console, new_table, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from hone.insight.compare import Run, Summary

app = typer.Typer(add_completion=False, no_args_is_help=True)

RootOption = Annotated[Path, typer.Option("--root", help="folder that holds the runs")]
PngOption = Annotated[Path | None, typer.Option("--png", help="also draw the curves into this file")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]

_HIGHLIGHTS = (
    *("actor_rollout_ref.model.path", "model.path", "actor_rollout_ref.model.lora_rank", "algorithm.adv_estimator"),
    *("data.train_files", "data.train_batch_size", "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.name"),
    *("actor_rollout_ref.actor.optim.lr", "optim.lr", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    *("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward", "critic.enable", "trainer.seed"),
)
_CHARTS = 4  # charts that `show` draws when no metric is named


@app.callback()
def group() -> None:
    """List, show and compare runs, print their samples, account for their prompts, and change the number of engines."""


app.command("samples")(run_samples.samples)
app.command("coverage")(run_coverage.coverage)
app.command("engines")(run_engines.engines)


@app.command("list")
def list_runs(root: RootOption = Path("runs"), as_json: JsonOption = False) -> None:
    """List the runs below a folder, oldest first."""
    from hone.errors import HoneError
    from hone.insight.compare import read_whole_run, run_names

    if not root.is_dir():
        raise HoneError(f"no folder '{root}'", fix="--root DIR with the run directories", code="E-runs")
    rows = [_overview(read_whole_run(path, name)) for name, path in run_names(root).items()]
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
    run: Annotated[str, typer.Argument(help="run directory, or its name below the root")],
    metric: Annotated[list[str] | None, typer.Option("--metric", help="metric to chart; repeat for several")] = None,
    png: PngOption = None,
    root: RootOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Show one run: status, main settings, metrics and curves."""
    from hone.insight.compare import find_run, headline_metrics, require_metrics, summarise

    shown_run = find_run(run, root)
    names = require_metrics(metric, [shown_run]) if metric else shown_run.names()
    if png is not None:
        _draw(png, [shown_run], metric or headline_metrics([shown_run]))
    summaries = {name: summary for name in names if (summary := summarise(shown_run, name))}
    if as_json:
        metrics = {name: vars(summary) for name, summary in summaries.items()}
        print_json(_overview(shown_run) | {"config": shown_run.config, "record": shown_run.record, "metrics": metrics})
        return
    console = new_console()
    _print_head(console, shown_run)
    table = new_table("metric", "first>", "last>", "best>", "at step>", "curve")
    from hone.insight.curves import points, sparkline

    room = max(8, min(30, console.width - max(map(len, summaries), default=0) - 52))
    for name, summary in summaries.items():
        step = "" if summary.best_step is None else str(summary.best_step)
        numbers = (_number(summary.first), _number(summary.last), _number(summary.best), step)
        table.add_row(name, *numbers, sparkline(points(shown_run.metrics, name), room))
    console.print(table if summaries else "no metrics yet")
    for name in metric or headline_metrics([shown_run])[:_CHARTS]:
        _print_chart(console, name, [shown_run])
    if png is not None:
        console.print(f"wrote {png}", markup=False, highlight=False)


@app.command("compare")
def compare(
    runs: Annotated[list[str], typer.Argument(help="two or more runs: directories, or names below the root")],
    metrics: Annotated[str | None, typer.Option("--metrics", help="metrics to compare, separated by commas")] = None,
    png: PngOption = None,
    root: RootOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Compare runs: differences of their configurations, and metrics."""
    from hone.errors import HoneError
    from hone.insight.compare import config_differences, find_run, headline_metrics, require_metrics, summarise

    if len(runs) < 2:
        raise HoneError(f"{len(runs)} run to compare", fix="give two or more: hone runs compare A B", code="E-runs")
    compared = [find_run(name, root) for name in runs]
    chosen = [name.strip() for name in metrics.split(",") if name.strip()] if metrics else []
    names = require_metrics(chosen, compared) or headline_metrics(compared)
    differences = config_differences(compared)
    if png is not None:
        _draw(png, compared, names)
    if as_json:
        summaries = {
            name: {run.name: vars(summary) for run in compared if (summary := summarise(run, name))} for name in names
        }
        overview = [_overview(run) for run in compared]
        print_json({"runs": overview, "config": differences, "metrics": summaries, "png": str(png) if png else None})
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
    for name in chosen or names[:_CHARTS]:
        _print_chart(console, name, compared)
    if png is not None:
        console.print(f"wrote {png}", markup=False, highlight=False)


# output --------------------------------------------------------------------------------------------------------------


def _overview(run: Run) -> dict[str, Any]:
    reward = run.last("critic/rewards/mean")
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "exit_reason": run.record.get("exit_reason", ""),
        "steps": run.steps,
        "last_reward": reward,
        "last_loss": run.last("train/loss"),
        "started": run.record.get("started"),
        "seconds": run.seconds,
    }


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
        "command": " ".join(run.record.get("command", [])),
        **{key: str(run.config[key]) for key in _HIGHLIGHTS if key in run.config},
    }
    console.print(run.name, style="bold", markup=False, highlight=False)
    width = max(map(len, facts))
    for key, value in facts.items():
        console.print(f"  {key:<{width}}  {value}", markup=False, highlight=False, soft_wrap=True)


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


def _print_chart(console: Console, metric: str, runs: Sequence[Run]) -> None:
    from hone.insight.curves import points, text_chart

    width = max(20, min(72, console.width - 14))
    curves = {run.name: points(run.metrics, metric) for run in runs}
    for run in runs:
        curve = curves[run.name]
        if curve:
            title = metric if len(runs) == 1 else f"{metric}  {run.name}"
            console.print(f"\n{title}", style="bold", markup=False, highlight=False)
            console.print(
                text_chart(curve, width=width, compared_with=list(curves.values())),
                markup=False,
                highlight=False,
                no_wrap=True,
            )


def _draw(png: Path, runs: Sequence[Run], names: Sequence[str]) -> None:
    from hone.errors import HoneError
    from hone.insight.curves import draw_png, points
    from hone.insight.run_files import disk_errors

    if not names:
        raise HoneError("the runs have no metrics to draw", fix="name metrics with --metrics", code="E-runs")
    curves = {name: {run.name: points(run.metrics, name) for run in runs} for name in names}
    present = {name: {run: curve for run, curve in by_run.items() if curve} for name, by_run in curves.items()}
    with disk_errors(png):
        draw_png(png, present)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _last_and_best(summary: Summary) -> str:
    best = "" if summary.best is None else f" ({_number(summary.best)})"
    return _number(summary.last) + best


def _when(started: Any) -> str:
    return str(started or "")[:16].replace("T", " ")


def _duration(seconds: float | None) -> str:
    from hone.insight.trackers.console import clock

    return "" if seconds is None else clock(seconds)
