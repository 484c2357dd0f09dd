"""`hone runs samples`: look at what a model answered, with its reward terms."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer


def samples(
    run: Annotated[str, typer.Argument(help="run directory, or its name below the root")],
    step: Annotated[int | None, typer.Option("--step", help="step; by default the newest with samples")] = None,
    worst: Annotated[int | None, typer.Option("--worst", min=1, help="the N with the lowest scores")] = None,
    best: Annotated[int | None, typer.Option("--best", min=1, help="the N with the highest scores")] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", help="only those whose prompt or response contains this text")
    ] = None,
    uid: Annotated[str | None, typer.Option("--uid", help="only those of this dataset row, such as train:17")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="without --worst and --best: the most to show")] = 5,
    validation: Annotated[bool, typer.Option("--validation", help="validation samples instead of rollouts")] = False,
    root: Annotated[Path, typer.Option("--root", help="folder that holds the runs")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="print whole records as JSON lines")] = False,
) -> None:
    """Print samples of a step: prompt, response, score and reward terms.

    Example: hone runs samples runs/hone/demo --worst 3
    """
    from hone.apps.lab.compare import find_run
    from hone.apps.lab.samples import SampleQuery, read_samples
    from hone.insight.records import trace

    folder = find_run(run, root).path / ("validation" if validation else "rollouts")
    result = read_samples(folder, SampleQuery(step, worst, best, grep, uid, limit))
    if as_json:
        for record in result.shown:
            typer.echo(json.dumps(record, ensure_ascii=False))
        return
    for record in result.shown:
        notes = [f"ended by {record['stop_reason']}", f"{len(record['response_ids'] or ())} tokens"]
        if record["advantages"]:
            notes.append(f"advantage {fmean(record['advantages']):+.3g}")
        if record["ground_truth"] is not None:
            notes.append(f"right: {record['ground_truth']}")
        typer.echo(trace(record) + f"({', '.join(notes)})\n")
    chosen = "" if result.matching == result.total else f" that match, of {result.total}"
    typer.echo(f"step {result.step}: {len(result.shown)} of {result.matching} samples{chosen}")
