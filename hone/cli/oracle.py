"""`hone oracle`: recompute a saved micro-batch of a run in float64, and find where the run diverges."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.options import Json, Trust

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    run: Annotated[Path, typer.Argument(help="run directory")],
    step: Annotated[int, typer.Option("--step", help="a step of trainer.save_microbatch_steps", min=1)],
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Recompute a micro-batch that a run saved, and print where the run diverges from it.

    Each sequence is computed alone with eager attention in float64 on the CPU: layers, log-probs, loss, gradients. Needs about
    24 bytes of memory per parameter. Exit code 0 if the run agrees up to rounding, 1 if it diverges.
    """
    from rich.console import Console

    from hone.apps.lab.oracle import as_json as plain
    from hone.apps.lab.oracle import compare, show
    from hone.cli.run_output import print_json
    from hone.training.microbatches import load_micro_batch

    result = compare(load_micro_batch(run, step))
    if as_json:
        print_json(plain(result))
    else:
        show(result, Console())
    if result.first is not None:
        raise typer.Exit(1)
