"""`hone runs compare`: configurations and metrics of runs, and which differences are more than noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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

    from hone.apps.lab.compare import Summary
    from hone.apps.lab.confidence import ArmComparison


def compare(
    runs: Annotated[list[str], typer.Argument(help="two or more runs: directories, or names below the root")],
    metrics: Annotated[str | None, typer.Option("--metrics", help="metrics to compare, separated by commas")] = None,
    level: Annotated[float, typer.Option("--level", help="level of the intervals", min=0.5, max=0.999)] = 0.95,
    effect: Annotated[
        float | None,
        typer.Option("--effect", help="difference to find, for the number of seeds; default: the observed one"),
    ] = None,
    png: PngOption = None,
    root: RootOption = Path("runs"),
    as_json: Json = False,
) -> None:
    """Compare runs: differences of their configurations, metrics, and which differences are more than noise.

    Runs with equal configurations apart from the seed form an arm. Each arm is compared with the first, paired by seed and
    prompt.
    """
    from hone.apps.lab.compare import config_differences, find_run, headline_metrics, require_metrics, summarise
    from hone.apps.lab.confidence import compare_arms, scores_in_common
    from hone.errors import HoneError

    if len(runs) < 2:
        raise HoneError(f"{len(runs)} run to compare", fix="give two or more: hone runs compare A B", code="E-runs")
    compared = [find_run(name, root) for name in runs]
    chosen = [name.strip() for name in metrics.split(",") if name.strip()] if metrics else []
    names = require_metrics(chosen, compared) or headline_metrics(compared)
    differences = config_differences(compared)
    measured = [scores_in_common(compared, metric) for metric in chosen or [None]]
    results = [
        result
        for scores in measured
        if scores is not None
        for result in compare_arms(compared, scores, level=level, effect=effect)
    ]
    if png is not None:
        draw_curves(png, compared, names)
    if as_json:
        summaries = {
            name: {run.name: vars(summary) for run in compared if (summary := summarise(run, name))} for name in names
        }
        record = {"runs": [overview(run) for run in compared], "config": differences, "metrics": summaries}
        confidence = [result.record() for result in results]
        print_json(record | {"confidence": confidence, "png": str(png) if png else None})
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
    for name in chosen or names[:CHARTS]:
        print_chart(console, name, compared)
    if png is not None:
        console.print(f"wrote {png}", markup=False, highlight=False)


def _last_and_best(summary: Summary) -> str:
    best = "" if summary.best is None else f" ({number(summary.best)})"
    return number(summary.last) + best


def print_confidence(console: Console, results: Sequence[ArmComparison]) -> None:
    """Print each comparison of two arms in words, and what limits it."""
    for item in results:
        for line in confidence_lines(item):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


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
