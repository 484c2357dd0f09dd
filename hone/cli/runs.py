"""`hone runs`: list, show, compare and bisect runs from their directories, and print sheets, samples, alerts and fates of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli import (
    run_alerts,
    run_bisect,
    run_compare,
    run_coverage,
    run_engines,
    run_prune,
    run_samples,
    run_sheet,
    run_triage,
)
from hone.cli.options import Json
from hone.cli.run_output import (
    CHARTS,
    PngOption,
    RootOption,
    draw_curves,
    new_console,
    new_table,
    number,
    overview,
    print_chart,
    print_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from hone.apps.lab.compare import Run

app = typer.Typer(add_completion=False, no_args_is_help=True)

_HIGHLIGHTS = (
    "actor_rollout_ref.model.path", "model.path", "actor_rollout_ref.model.lora_rank", "algorithm.adv_estimator",
    "data.train_files", "data.train_batch_size", "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.actor.optim.lr", "optim.lr", "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward", "critic.enable", "trainer.seed",
)  # fmt: skip


@app.callback()
def group() -> None:
    """List, show, compare, diagnose and bisect runs, print sheets and samples, and change the number of engines."""


app.command("compare")(run_compare.compare)
app.command("bisect")(run_bisect.bisect)
app.command("sheet")(run_sheet.sheet)
app.command("note")(run_sheet.note)
app.command("samples")(run_samples.samples)
app.command("coverage")(run_coverage.coverage)
app.command("engines")(run_engines.engines)
app.command("prune")(run_prune.prune)
app.command("triage")(run_triage.triage)
app.command("alerts")(run_alerts.alerts)
app.command("diagnose")(run_alerts.diagnose)


@app.command("list")
def list_runs(root: RootOption = Path("runs"), as_json: Json = False) -> None:
    """List the runs below a folder, oldest first."""
    from hone.apps.lab.compare import run_names, whole_runs
    from hone.errors import HoneError

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
    run: Annotated[str, typer.Argument(help="run directory, or its name below the root")],
    metric: Annotated[list[str] | None, typer.Option("--metric", help="metric to chart; repeat for several")] = None,
    png: PngOption = None,
    root: RootOption = Path("runs"),
    as_json: Json = False,
) -> None:
    """Show one run: status, main settings, metrics and curves."""
    from hone.apps.lab.compare import find_run, headline_metrics, require_metrics, summarise
    from hone.insight.curves import points, sparkline

    shown_run = find_run(run, root)
    names = require_metrics(metric, [shown_run]) if metric else shown_run.names()
    if png is not None:
        draw_curves(png, [shown_run], metric or headline_metrics([shown_run]))
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
    for name in metric or headline_metrics([shown_run])[:CHARTS]:
        print_chart(console, name, [shown_run])
    if png is not None:
        console.print(f"wrote {png}", markup=False, highlight=False)


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
