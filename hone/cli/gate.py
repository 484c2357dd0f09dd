"""`hone gate`: whether a model passes a suite of checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.options import ComputeDtype, Dtype

app = typer.Typer(add_completion=False)

REFUSED = 4
"""Exit code of a model that does not pass."""


@app.callback(invoke_without_command=True)
def command(
    model: Annotated[str, typer.Argument(help="Hugging Face model directory, PEFT adapter directory, or checkpoint")],
    suite: Annotated[Path, typer.Option(help="YAML file with the checks")],
    against: Annotated[str | None, typer.Option(help="model that was released last, for no_worse_by")] = None,
    output: Annotated[Path | None, typer.Option(help="write the report as JSON to this file")] = None,
    dtype: ComputeDtype = Dtype.auto,
) -> None:
    """Let a model answer held-out data, and decide whether it may be released.

    Exit code 0: it passes all checks; 4: it does not. Example:
    hone gate runs/arith --suite gate.yaml --against released/model --output report.json
    """
    from rich.console import Console
    from rich.table import Table

    from hone.gates.gate import run_gate
    from hone.gates.suite import read_suite

    console = Console()
    checks = read_suite(suite)
    verdict = run_gate(
        model,
        checks,
        against=against,
        dtype=dtype.value,
        on_check=lambda check: console.print(f"check {check.name}: {', '.join(check.data)}", highlight=False),
    )
    table = Table("check", "condition", "measured", "bound", "verdict", "about")
    for one in verdict.conditions:
        table.add_row(
            *(one.check, one.name, f"{one.measured:.4f}", f"{one.bound:g}"),
            *("passed" if one.passed else "[bold red]refused[/]", one.about),
        )
    console.print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(verdict.record(), indent=1) + "\n")
    refused = sum(not one.passed for one in verdict.conditions)
    if refused:
        console.print(f"refused: {refused} of {len(verdict.conditions)} conditions do not hold", style="bold red")
        raise typer.Exit(REFUSED)
    console.print(f"passed: all {len(verdict.conditions)} conditions hold", style="bold green")
