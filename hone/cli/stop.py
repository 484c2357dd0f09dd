"""`hone stop`: end a run after its step, or at once with its tools."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.cli.run_output import RootOption

if TYPE_CHECKING:
    from hone.insight.stop_requests import StopRequest

app = typer.Typer(add_completion=False)

_POLL = 0.2


@app.callback(invoke_without_command=True)
def command(
    runs: Annotated[list[str] | None, typer.Argument(help="run directories, or their names below the root")] = None,
    every: Annotated[bool, typer.Option("--all", help="all running runs below the root")] = False,
    at_once: Annotated[
        bool,
        typer.Option(
            "--now", help="do not finish the step: end the run and its tools within seconds, and keep it stopped"
        ),
    ] = False,
    reason: Annotated[str, typer.Option(help="reason, for the run's record")] = "",
    clear: Annotated[bool, typer.Option("--clear", help="let a stopped run start again")] = False,
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait for the end of the runs")] = 0.0,
    root: RootOption = Path("runs"),
) -> None:
    """Stop runs; the same command as before resumes them.

    Without --now a run finishes its step and saves. With --now tool calls under way are cancelled, none begins, and the run resumes
    from its last checkpoint once --clear has removed the request.

    Examples: hone stop runs/hone/demo; hone stop --all --now --reason "the tool deletes files"
    """
    from hone.apps.lab.compare import find_run, run_names
    from hone.errors import HoneError
    from hone.insight.run_files import read_run
    from hone.insight.stop_requests import StopRequest, clear_stop, send_stop

    if bool(runs) == every:
        raise HoneError("name runs, or all of them with --all", fix="hone stop RUN", code="E-runs")
    paths = (
        [path for path in run_names(root).values() if read_run(path)["status"] == "running"]
        if every
        else [find_run(name, root).path for name in runs or ()]
    )
    if clear:
        for path in paths:
            typer.echo(f"{path}: {'may start again' if clear_stop(path) else 'was not stopped'}")
        return
    request = StopRequest(at_once, reason)
    for path in paths:
        status = read_run(path)["status"]
        if status != "running" and not at_once:
            raise HoneError(
                f"the run is not running: {status}",
                why="there is no step to finish",
                fix=f"hone stop {path} --now, to keep it from starting",
                where=str(path),
                code="E-runs",
            )
        send_stop(path, request)
        typer.echo(f"{path}: {'stops at once' if at_once else 'stops after its step'}")
    _wait(paths, request, wait)
    if every and not paths:
        typer.echo(f"no run below {root} is running")


def _wait(paths: list[Path], request: StopRequest, seconds: float) -> None:
    from hone.errors import HoneError
    from hone.insight.run_files import read_run
    from hone.insight.run_lock import is_held

    deadline = time.monotonic() + seconds
    left = list(paths) if seconds else []
    while left:
        left = [path for path in left if is_held(path)]
        for path in set(paths) - set(left):
            record = read_run(path)
            typer.echo(f"{path}: {record['status']}, {record['exit_reason']}")
            paths = [other for other in paths if other != path]
        if left and time.monotonic() > deadline:
            raise HoneError(
                f"{len(left)} of the runs have not ended within {seconds:g} s, such as {left[0]}",
                why="the step takes longer" if not request.at_once else "its machine does not see the file, or hangs",
                fix="--wait with more seconds"
                if not request.at_once
                else "kill its process (pid and host in run.json)",
                code="E-runs",
            )
        time.sleep(_POLL)
