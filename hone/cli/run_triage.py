"""`hone runs triage`: what failed first in failed episodes, and one change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.options import Json
from hone.cli.run_output import RootOption


def triage(
    run: Annotated[str, typer.Argument(help="run directory, or its name below the root")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="number of newest stored steps to read")] = 5,
    step: Annotated[int | None, typer.Option("--step", help="read this step only")] = None,
    per_task: Annotated[int, typer.Option("--per-task", min=1, help="most failed episodes of a task to sort")] = 50,
    validation: Annotated[bool, typer.Option("--validation", help="validation samples instead of rollouts")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="write the page into this file as well")] = None,
    root: RootOption = Path("runs"),
    as_json: Json = False,
) -> None:
    """Sort failed episodes into runtime, data, reward and config by their first failing turn, and propose one change.

    Example: hone runs triage runs/hone/demo --steps 3
    """
    from hone.apps.lab.compare import find_run
    from hone.apps.lab.triage import markdown
    from hone.apps.lab.triage import triage as sorted_failures
    from hone.cli.run_output import print_json
    from hone.insight.run_files import disk_errors

    folder = "validation" if validation else "rollouts"
    result = sorted_failures(find_run(run, root), folder=folder, steps=steps, step=step, per_task=per_task)
    if out is not None:
        with disk_errors(out):
            out.write_text(markdown(result), encoding="utf-8")
    if as_json:
        print_json(result.record())
    else:
        typer.echo(markdown(result), nl=False)
