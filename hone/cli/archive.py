"""`hone archive`: rollouts of other programs into the archive, and the archive into JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def group() -> None:
    """Import rollouts of other programs into the archive of rollouts, and export an archive as JSON lines."""


@app.command("import")
def import_source(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="file or folder with rollouts")],
    out: Annotated[Path, typer.Option("--out", help="run directory to write")],
    name: Annotated[str, typer.Option("--format", help="auto, verl, trl, prime-rl, slime, miles or jsonl")] = "auto",
) -> None:
    """Convert rollouts of verl, TRL, prime-rl, slime, miles or plain JSON lines to a run directory.

    Example: hone archive import outputs/rollouts --out runs/theirs
    """
    from hone.apps.lab.importers import import_rollouts

    result = import_rollouts(source, out, name)
    typer.echo(f"{out}: {sum(result.rows.values())} sequences of {len(result.rows)} steps ({result.format})")
    if result.validation:
        typer.echo(f"{out}/validation: {sum(result.validation.values())} of {len(result.validation)} validations")


@app.command("export")
def export(
    run: Annotated[str, typer.Argument(help="run directory, or its name below the root")],
    out: Annotated[Path, typer.Option("--out", help="file of JSON lines to write")],
    step: Annotated[int | None, typer.Option("--step", help="step; by default all")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="validation samples instead of rollouts")] = False,
    root: Annotated[Path, typer.Option("--root", help="folder that holds the runs")] = Path("runs"),
) -> None:
    """Write the sequences of a run as JSON lines, one object with all columns per sequence.

    Example: hone archive export runs/hone/demo --step 10 --out step_10.jsonl
    """
    from hone.apps.lab.compare import find_run
    from hone.apps.lab.importers.jsonl import export_records

    folder = find_run(run, root).path / ("validation" if validation else "rollouts")
    typer.echo(f"{out}: {export_records(folder, out, step)} sequences")
