"""Output of commands: plain tables, charts and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hone.errors import HoneError
from hone.insight.run_files import disk_errors, jsonable

if TYPE_CHECKING:
    from rich.console import Console

    from hone.apps.lab.compare import Run

CHARTS = 4
"""Charts that are drawn when no metric is named."""


def new_console() -> Console:
    """Return a console of the terminal's width."""
    from rich.console import Console

    return Console()


def new_table(*columns: str) -> Any:
    """Return a plain table; a heading that ends in ``>`` marks a right-aligned column."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        side = "right" if column.endswith(">") else "left"
        # the first column has what one types next: the others give way to it
        result.add_column(column.rstrip(">"), justify=side, overflow="fold", no_wrap=number == 0)
    return result


def print_plain(console: Console, text: str, **style: Any) -> None:
    """Print text as it is, without wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True, **style)


def print_json(value: Any) -> None:
    """Print a value as indented JSON; arrays and numbers that JSON lacks are converted."""
    typer.echo(json.dumps(jsonable(value), indent=2, ensure_ascii=False))


def overview(run: Run) -> dict[str, Any]:
    """Return the main facts of a run for a table or JSON."""
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


def print_chart(console: Console, metric: str, runs: Sequence[Run]) -> None:
    """Print a chart of a metric for each run, with common axes."""
    from hone.insight.curves import points, text_chart

    width = max(20, min(72, console.width - 14))
    curves = {run.name: points(run.metrics, metric) for run in runs}
    for run in runs:
        curve = curves[run.name]
        if curve:
            title = metric if len(runs) == 1 else f"{metric}  {run.name}"
            print_plain(console, f"\n{title}", style="bold")
            console.print(
                text_chart(curve, width=width, compared_with=list(curves.values())),
                markup=False,
                highlight=False,
                no_wrap=True,
            )


def draw_curves(png: Path, runs: Sequence[Run], names: Sequence[str]) -> None:
    """Draw metrics of runs into a PNG."""
    from hone.insight.curves import draw_png, points

    if not names:
        raise HoneError("the runs have no metrics to draw", fix="name metrics with --metrics", code="E-runs")
    curves = {name: {run.name: points(run.metrics, name) for run in runs} for name in names}
    present = {name: {run: curve for run, curve in by_run.items() if curve} for name, by_run in curves.items()}
    with disk_errors(png):
        draw_png(png, present)


def number(value: float | None) -> str:
    """Return a number with four digits, nothing for None."""
    return "" if value is None else f"{value:.4g}"
