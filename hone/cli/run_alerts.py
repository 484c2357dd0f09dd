"""`hone runs alerts` and `hone runs diagnose`: what the detectors reported, or would have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hone.cli.options import Json
from hone.cli.run_output import RootOption

RunArgument = Annotated[str, typer.Argument(help="run directory, or its name below the root")]


def alerts(run: RunArgument, root: RootOption = Path("runs"), as_json: Json = False) -> None:
    """List the alerts that a run gave while it trained."""
    from hone.apps.lab.compare import find_run
    from hone.insight.run_files import read_alerts

    path = find_run(run, root).path
    _show(path, read_alerts(path), as_json)


def diagnose(run: RunArgument, root: RootOption = Path("runs"), as_json: Json = False) -> None:
    """Run all detectors over the metrics of a run, also of one that had none while it trained."""
    from hone.apps.lab.compare import find_run
    from hone.insight.detectors.watch import diagnose_run

    wanted = find_run(run, root)
    alerts = diagnose_run(wanted.path, wanted.metrics, wanted.config)
    _show(wanted.path, [{"step": alert.step, **alert.record()} for alert in alerts], as_json)


def _show(path: Path, records: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    from hone.cli.run_output import print_json
    from hone.insight.detectors import render_alert

    if as_json:
        print_json(list(records))
        return
    for record in records:
        typer.echo(render_alert(record, str(path)))
    if not records:
        typer.echo("no alerts")
