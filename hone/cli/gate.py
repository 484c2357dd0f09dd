"""`hone gate`: whether a model passes a suite of checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.cli.options import ComputeDtype, Dtype

if TYPE_CHECKING:
    from hone.apps.ops.gate import Verdict

app = typer.Typer(add_completion=False)

REFUSED = 4
"""Exit code of a model that does not pass."""
GATE_PATIENCE = 30.0
"""Seconds that the command waits for the webhook."""


@app.callback(invoke_without_command=True)
def command(
    model: Annotated[str, typer.Argument(help="Hugging Face model directory, PEFT adapter directory, or checkpoint")],
    suite: Annotated[Path, typer.Option(help="YAML file with the checks")],
    against: Annotated[str | None, typer.Option(help="model that was released last, for no_worse_by")] = None,
    output: Annotated[Path | None, typer.Option(help="write the report as JSON to this file")] = None,
    dtype: ComputeDtype = Dtype.auto,
    webhook: Annotated[
        str | None,
        typer.Option(help="address that gets the verdict as JSON, with a text for Slack", envvar="HONE_WEBHOOK"),
    ] = None,
) -> None:
    """Let a model answer held-out data, and decide whether it may be released.

    Exit code 0: it passes all checks; 4: it does not. Example:
    hone gate runs/arith --suite gate.yaml --against released/model --output report.json
    """
    from rich.console import Console
    from rich.table import Table

    from hone.apps.ops.gate import run_gate
    from hone.apps.ops.suite import read_suite
    from hone.insight.webhook import check_address

    console = Console()
    if webhook is not None:
        check_address(webhook)
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
    if webhook is not None:
        _notify(webhook, verdict)
    refused = sum(not one.passed for one in verdict.conditions)
    if refused:
        console.print(f"refused: {refused} of {len(verdict.conditions)} conditions do not hold", style="bold red")
        raise typer.Exit(REFUSED)
    console.print(f"passed: all {len(verdict.conditions)} conditions hold", style="bold green")


def _notify(url: str, verdict: Verdict) -> None:
    """Send a verdict; one that is not delivered is said, and changes nothing else."""
    from hone.insight.webhook import Webhook, run_name

    record = verdict.record()
    refused = [one for one in record["conditions"] if not one["passed"]]
    shown = "; ".join(f"{one['check']} {one['name']}: {one['about']}" for one in refused)
    text = f"gate passed: {len(record['conditions'])} conditions" if not refused else f"gate refused: {shown}"
    sender = Webhook(url, run_name(verdict.model))
    sender.send("gate", text, **record)
    if sender.close(GATE_PATIENCE)["failed"]:
        typer.echo(f"the verdict was not delivered to the webhook: {sender.error}", err=True)
