"""`hone runs engines`: the replicas of a running run, and their number."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.cli.options import Json
from hone.cli.run_output import new_console, new_table, print_json

if TYPE_CHECKING:
    from hone.apps.lab.compare import Run
    from hone.insight.stop_requests import ReplicaAnswer, ReplicaRequest

_POLL = 0.1


def engines(
    run: Annotated[str, typer.Argument(help="run directory, or its name below the root")],
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=1, help="replicas that every rollout worker should have from now on")
    ] = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="seconds to wait for the run's answer")] = 15.0,
    root: Annotated[Path, typer.Option("--root", help="folder that holds the runs")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Show the engine replicas of a running run, or change their number without a restart.

    New replicas start while the run trains, and serve once they have the latest weights; surplus ones finish their requests and
    end. A resumed run has the number of its configuration again.

    Example: hone runs engines runs/hone/demo --replicas 2
    """
    from hone.apps.lab.compare import find_run
    from hone.errors import HoneError
    from hone.insight.stop_requests import ReplicaRequest, send_request, withdraw_request

    shown_run = find_run(run, root)
    _check(shown_run)
    request = ReplicaRequest(replicas)
    send_request(shown_run.path, request)
    answer = _wait_for(shown_run.path, request, wait)
    if answer is None and replicas is None:
        withdraw_request(shown_run.path)
    if answer is None:
        raise HoneError(
            f"the run has not answered within {wait:g} s",
            where=str(shown_run.path),
            why="it is starting, ending, or computes in the thread that reads requests"
            + ("" if replicas is None else "; it will still carry the request out if it continues"),
            fix=f"hone runs engines {run} --wait {max(60, 4 * wait):g}",
            code="E-runs",
        )
    if answer.refused:
        raise HoneError(**answer.refused, where=str(shown_run.path), code="E-runs")
    if as_json:
        print_json(asdict(answer))
    else:
        _print(answer)


def _check(run: Run) -> None:
    from hone.config.engines import SERVED
    from hone.errors import HoneError

    name, block = run.config.get("actor_rollout_ref.rollout.name"), "actor_rollout_ref.rollout"
    if run.status != "running":
        raise HoneError(
            f"the run is not running: {run.status} after step {run.steps}",
            where=str(run.path),
            why="its engines have ended",
            fix=f"start it with the number of engines in its configuration: {block}.num_replicas",
            code="E-runs",
        )
    if name not in SERVED and run.config.get(f"{block}.num_replicas") is None:
        engine = "no engine" if name is None else f"the engine '{name}' in the trainer's process"
        raise HoneError(
            f"the run has {engine}, without replicas",
            where=str(run.path),
            why="only engines in separate processes can join or leave",
            fix=f"start the run with {block}.num_replicas=1",
            code="E-runs",
        )


def _wait_for(run: Path, request: ReplicaRequest, seconds: float) -> ReplicaAnswer | None:
    from hone.insight.stop_requests import read_answer

    deadline = time.monotonic() + seconds
    while (answer := read_answer(run, request.key)) is None and time.monotonic() < deadline:
        time.sleep(_POLL)
    return answer


def _print(answer: ReplicaAnswer) -> None:
    from rich.markup import escape

    columns = ("replica", "worker", "state", "requests", "limit", "version", "starts", "problem")
    table = new_table(*(f"{name}>" if name not in ("state", "problem") else name for name in columns))
    for report in sorted(answer.replicas, key=lambda report: report["replica"]):
        table.add_row(*("" if report[name] is None else escape(str(report[name])) for name in columns))
    out = new_console()
    out.print(f"wanted replicas per rollout worker: {answer.wanted} of at most {answer.limit} (at {answer.at})")
    out.print(table)
