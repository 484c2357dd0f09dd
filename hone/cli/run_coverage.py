"""`hone runs coverage`: the fate of every prompt that a run drew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import Json
from hone.cli.run_output import new_console, new_table, print_json

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = ("drawn", "trained", "filtered", "failed", "too_old", "finished", "in_flight", "waiting")
_BAR = 40  # width of the longest bar of the lags
_MOST_REASONS = 10


def coverage(
    run: Annotated[str, typer.Argument(help="run directory, or its name below the root")],
    png: Annotated[Path | None, typer.Option("--png", help="also draw fates and distributions into this file")] = None,
    root: Annotated[Path, typer.Option("--root", help="folder that holds the runs")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Show the fate of every drawn prompt, and whether dropped prompts differ from trained ones.

    Exit code 1 if the record contradicts itself.

    Example: hone runs coverage runs/hone/demo --png coverage.png
    """
    from hone.apps.lab.compare import find_run
    from hone.apps.lab.coverage import coverage_report
    from hone.insight.coverage import read_coverage

    shown_run = find_run(run, root)
    fates = read_coverage(shown_run.path)
    report = coverage_report(fates)
    if png is not None:
        from hone.apps.lab.coverage import draw_coverage
        from hone.insight.run_files import disk_errors

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
    _line(out, f"fates of {counts['drawn']} prompts up to step {report['step']}")
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
        _line(out, f"sampled tokens: {', '.join(named)}")
    for epoch in report["never_trained"]:
        if epoch["never_trained"]:
            fates = ", ".join(f"{count} {fate.replace('_', ' ')}" for fate, count in epoch["fates"].items())
            _line(
                out,
                f"epoch {epoch['epoch']}: {epoch['never_trained']} of {epoch['prompts']} prompts were never trained "
                f"({fates}), such as {', '.join(epoch['uids'][:3])}",
            )
    for sentence in report["bias"]["words"]:
        _line(out, sentence)


def _line(out: Console, text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)
