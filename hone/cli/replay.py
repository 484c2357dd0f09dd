"""`hone replay`: run a stored step of a run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.options import Json, Trust
from hone.cli.run_output import RootOption

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    run: Annotated[str, typer.Argument(help="directory or name of a run")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="keys of the configuration to change")
    ] = None,
    step: Annotated[int, typer.Option("--step", help="a step of trainer.save_steps_for_replay", min=1)] = 1,
    first: Annotated[
        str | None,
        typer.Option(
            "--from", help="first stage to run, such as reward, adv or update_actor; those before it are stored"
        ),
    ] = None,
    root: RootOption = Path("runs"),
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Run a stored step again from the checkpoint before it, and compare tokens, rewards, advantages, metrics and weights.

    Exit code 0 if all are equal bit for bit, 1 if something differs. Example: hone replay demo --step 20 --from adv
    """
    from hone.apps.lab.compare import find_run
    from hone.apps.lab.replay.replay import replay
    from hone.cli.run_bisect import bisection_lines
    from hone.cli.run_output import print_json

    result = replay(find_run(run, root).path, step, first, overrides or ())
    different = result.bisection.first
    if as_json:
        print_json({"folder": str(result.folder), "stages": result.stages, "first": different and vars(different)})
    else:
        typer.echo(f"step {step} again: {', '.join(result.stages)}; in {result.folder}")
        if different is None:
            typer.echo("equal bit for bit to the stored step")
        for line in bisection_lines(result.bisection) if different is not None else ():
            typer.echo(line)
    if different is not None:
        raise typer.Exit(1)
