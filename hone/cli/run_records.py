"""`hone runs alerts`, `diagnose`, `samples`, `coverage` and `triage`: what a run recorded, and what it means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.apps.lab.compare import find_run
from hone.cli.options import RUNS, Json, Root, RunName
from hone.cli.output import new_console, new_table, print_json, print_plain
from hone.insight.run_files import disk_errors, read_alerts

if TYPE_CHECKING:
    from rich.console import Console


def alerts(run: RunName, root: Root = RUNS, as_json: Json = False) -> None:
    """List the alerts that a run gave while it trained."""
    path = find_run(run, root).path
    _show(path, read_alerts(path), as_json)


def diagnose(run: RunName, root: Root = RUNS, as_json: Json = False) -> None:
    """Run all detectors over the metrics of a run, also of one that had none while it trained."""
    from hone.insight.detectors.watch import diagnose_run

    wanted = find_run(run, root)
    alerts = diagnose_run(wanted.path, wanted.metrics, wanted.config)
    _show(wanted.path, [{"step": alert.step, **alert.record()} for alert in alerts], as_json)


def _show(path: Path, records: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    from hone.insight.detectors import render_alert

    if as_json:
        print_json(list(records))
        return
    for record in records:
        typer.echo(render_alert(record, str(path)))
    if not records:
        typer.echo("no alerts")


def samples(
    run: RunName,
    step: Annotated[int | None, typer.Option("--step", help="step; by default the newest with samples")] = None,
    worst: Annotated[int | None, typer.Option("--worst", min=1, help="the N with the lowest scores")] = None,
    best: Annotated[int | None, typer.Option("--best", min=1, help="the N with the highest scores")] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", help="only those whose prompt or response contains this text")
    ] = None,
    uid: Annotated[str | None, typer.Option("--uid", help="only those of this dataset row, such as train:17")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="without --worst and --best: the most to show")] = 5,
    validation: Annotated[bool, typer.Option("--validation", help="validation samples instead of rollouts")] = False,
    root: Root = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="print whole records as JSON lines")] = False,
) -> None:
    """Print samples of a step: prompt, response, score and reward terms.

    Example: hone runs samples runs/hone/demo --worst 3
    """
    from hone.apps.lab.samples import SampleQuery, read_samples
    from hone.insight.records import trace

    folder = find_run(run, root).path / ("validation" if validation else "rollouts")
    result = read_samples(folder, SampleQuery(step, worst, best, grep, uid, limit))
    if as_json:
        for record in result.shown:
            typer.echo(json.dumps(record, ensure_ascii=False))
        return
    for record in result.shown:
        notes = [f"{len(record['response_ids'] or ())} tokens"]
        if not record.get("episode"):  # else the trace says how it ended
            notes.insert(0, f"ended by {record['stop_reason']}")
        if record["advantages"]:
            notes.append(f"advantage {fmean(record['advantages']):+.3g}")
        if record["ground_truth"] is not None:
            notes.append(f"right: {record['ground_truth']}")
        typer.echo(trace(record) + f"({', '.join(notes)})\n")
    if not result.matching:
        typer.echo(f"step {result.step}: none of {result.total} samples matches; --step N looks at another step")
        return
    chosen = "" if result.matching == result.total else f" that match, of {result.total}"
    typer.echo(f"step {result.step}: {len(result.shown)} of {result.matching} samples{chosen}")


_COLUMNS = ("drawn", "trained", "filtered", "failed", "too_old", "finished", "in_flight", "waiting")
_BAR = 40  # width of the longest bar of the lags
_MOST_REASONS = 10


def coverage(
    run: RunName,
    png: Annotated[Path | None, typer.Option("--png", help="also draw fates and distributions into this file")] = None,
    root: Root = RUNS,
    as_json: Json = False,
) -> None:
    """Show the fate of every drawn prompt, and whether dropped prompts differ from trained ones.

    Exit code 1 if the record contradicts itself.

    Example: hone runs coverage runs/hone/demo --png coverage.png
    """
    from hone.apps.lab.coverage import coverage_report
    from hone.insight.coverage import read_coverage

    shown_run = find_run(run, root)
    fates = read_coverage(shown_run.path)
    report = coverage_report(fates)
    if png is not None:
        from hone.apps.lab.coverage import draw_coverage

        with disk_errors(png):
            draw_coverage(png, fates, title=shown_run.name)
    if as_json:
        print_json(report | {"png": str(png) if png else None})
    else:
        _print(new_console(), report)
        if png is not None:
            typer.echo(f"wrote {png}")
    if report["problem"]:
        typer.echo(f"coverage.jsonl contradicts itself: {report['problem']}", err=True)
        raise typer.Exit(1)


def _print(out: Console, report: dict[str, Any]) -> None:
    from rich.markup import escape

    counts = report["counts"]
    shown = [name for name in _COLUMNS if name in ("drawn", "trained") or counts[name]]
    rows = new_table("epoch", *(f"{name.replace('_', ' ')}>" for name in shown))
    for epoch, row in report["by_epoch"].items():
        rows.add_row(epoch, *(str(row[name]) for name in shown))
    if len(report["by_epoch"]) != 1:
        rows.add_row("all", *(str(counts[name]) for name in shown))
    print_plain(out, f"fates of {counts['drawn']} prompts up to step {report['step']}")
    out.print(rows)
    if set(report["lags"]) - {"0"}:
        most = max(report["lags"].values())
        rows = new_table("lag in updates>", "prompts>", "")
        for lag, count in report["lags"].items():
            rows.add_row(lag, str(count), "█" * max(1, round(_BAR * count / most)))
        out.print(rows)
    if report["reasons"]:
        rows = new_table("fate", "prompts>", "reason")
        for entry in report["reasons"][:_MOST_REASONS]:
            rows.add_row(entry["fate"], str(entry["count"]), escape(entry["reason"]))
        out.print(rows)
    if len(report["token_shares"]) > 1:
        named = (f"{share:.1%} {fate.replace('_', ' ')}" for fate, share in report["token_shares"].items())
        print_plain(out, f"sampled tokens: {', '.join(named)}")
    for epoch in report["never_trained"]:
        if epoch["never_trained"]:
            fates = ", ".join(f"{count} {fate.replace('_', ' ')}" for fate, count in epoch["fates"].items())
            print_plain(
                out,
                f"epoch {epoch['epoch']}: {epoch['never_trained']} of {epoch['prompts']} prompts were never trained "
                f"({fates}), such as {', '.join(epoch['uids'][:3])}",
            )
    for sentence in report["bias"]["words"]:
        print_plain(out, sentence)


def triage(
    run: RunName,
    steps: Annotated[int, typer.Option("--steps", min=1, help="number of newest stored steps to read")] = 5,
    step: Annotated[int | None, typer.Option("--step", help="read this step only")] = None,
    per_task: Annotated[int, typer.Option("--per-task", min=1, help="most failed episodes of a task to sort")] = 50,
    validation: Annotated[bool, typer.Option("--validation", help="validation samples instead of rollouts")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="write the page into this file as well")] = None,
    root: Root = RUNS,
    as_json: Json = False,
) -> None:
    """Sort failed episodes into runtime, data, reward and config by their first failing turn, and propose one change.

    Example: hone runs triage runs/hone/demo --steps 3
    """
    from hone.apps.lab.triage import markdown
    from hone.apps.lab.triage import triage as sorted_failures

    folder = "validation" if validation else "rollouts"
    result = sorted_failures(find_run(run, root), folder=folder, steps=steps, step=step, per_task=per_task)
    if out is not None:
        with disk_errors(out):
            out.write_text(markdown(result), encoding="utf-8")
    if as_json:
        print_json(result.record())
    else:
        typer.echo(markdown(result), nl=False)
