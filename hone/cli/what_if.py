"""`hone what-if`: what other methods would have made of a stored step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.cli.options import Json, Trust

if TYPE_CHECKING:
    from hone.apps.lab.replay.what_if import WhatIf

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    run: Annotated[str, typer.Argument(help="directory or name of a run")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value]...", help="keys of algorithm and actor to change, all at once"),
    ] = None,
    step: Annotated[int, typer.Option("--step", help="step with all its samples in rollouts/", min=1)] = 1,
    root: Annotated[Path, typer.Option("--root", help="folder in which names are looked for")] = Path("runs"),
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="compare gradients by the weights that the step began with")
    ] = True,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Compute a stored step again with other keys, or with every registered estimator and policy loss, and compare.

    The first line is the run itself. Example: hone what-if demo --step 10 algorithm.adv_estimator=rloo
    """
    from hone.apps.lab.compare import find_run
    from hone.apps.lab.replay.stored import WeightGradients, load_step
    from hone.apps.lab.replay.what_if import every_method, what_if

    stored = load_step(find_run(run, root).path, step)
    named = [("changed", changes)] if changes else list(every_method(stored.config))
    result = what_if(stored, named, WeightGradients(stored) if weights else None)
    if as_json:
        from hone.cli.run_output import print_json

        print_json(result.as_json())
    else:
        _show(result, stored.step)
        if changes:
            typer.echo(f"changed: {' '.join(changes)}")


def _show(result: WhatIf, step: int) -> None:
    from hone.cli.run_output import new_console, new_table

    console = new_console()
    equal = "bit for bit equal to" if result.gap == 0 else f"up to {result.gap:.2g} apart from"
    console.print(f"step {step}: advantages computed again are {equal} those that the run used", highlight=False)
    headings = ["loss>", "|advantage|>", "turned>", "clipped>", "effective>", "cosine>"]
    table = new_table("", *headings, *(["direction>"] if result.exact is not None else []))
    for line in result.compared:
        if line.missing is not None:
            table.add_row(line.name, *["-"] * (len(table.columns) - 1))
            continue
        shares = [f"{share:.1%}" for share in (line.turned, line.clipped, line.effective_share)]
        direction = [] if line.direction is None else [f"{line.direction:.4f}"]
        table.add_row(line.name, f"{line.loss:.4g}", f"{line.advantage:.4g}", *shares, f"{line.cosine:.4f}", *direction)
    console.print(table)
    for line in result.compared:
        if line.missing is not None:
            console.print(f"{line.name}: {line.missing}", highlight=False)
    console.print(_LEGEND, highlight=False)
    if result.exact is False:
        console.print("direction: of the last layer's parameters alone", highlight=False)


_LEGEND = """loss: of the first mini-batch, at the weights before the step
turned: sequences whose advantage has the other sign
clipped: tokens with an advantage that the loss does not move
effective: tokens that carry the gradient, as a share of those in the loss (1 if all weigh the same)
cosine: with the run, of the derivatives by log-probs; direction: of the gradients by the weights"""
