"""`hone stop`, `hone runs engines` and `hone runs prune`: end runs, change their engines, delete what they no longer need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.apps.lab.compare import Run, find_run, run_names
from hone.cli.options import RUNS, Json, Root, RunName
from hone.cli.output import new_console, new_table, print_json
from hone.errors import HoneError
from hone.insight.run_files import read_run

if TYPE_CHECKING:
    from hone.apps.ops.retention import Surplus
    from hone.insight.stop_requests import ReplicaAnswer, ReplicaRequest, StopRequest


def stop(
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
    root: Root = RUNS,
) -> None:
    """Stop runs; the same command as before resumes them.

    Without --now a run finishes its step and saves. With --now tool calls under way are cancelled, none begins, and the run resumes
    from its last checkpoint once --clear has removed the request.

    Examples: hone stop runs/hone/demo; hone stop --all --now --reason "the tool deletes files"
    """
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


_POLL = 0.1


def engines(
    run: RunName,
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=1, help="replicas that every rollout worker should have from now on")
    ] = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="seconds to wait for the run's answer")] = 15.0,
    root: Root = RUNS,
    as_json: Json = False,
) -> None:
    """Show the engine replicas of a running run, or change their number without a restart.

    New replicas start while the run trains, and serve once they have the latest weights; surplus ones finish their requests and
    end. A resumed run has the number of its configuration again.

    Example: hone runs engines runs/hone/demo --replicas 2
    """
    from hone.insight.stop_requests import ReplicaRequest, send_request, withdraw_request

    shown_run = find_run(run, root)
    _check_replicas(shown_run)
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
        _print_answer(answer)


def _check_replicas(run: Run) -> None:
    from hone.config.engines import SERVED

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


def _print_answer(answer: ReplicaAnswer) -> None:
    from rich.markup import escape

    columns = ("replica", "worker", "state", "requests", "limit", "version", "starts", "problem")
    table = new_table(*(f"{name}>" if name not in ("state", "problem") else name for name in columns))
    for report in sorted(answer.replicas, key=lambda report: report["replica"]):
        table.add_row(*("" if report[name] is None else escape(str(report[name])) for name in columns))
    out = new_console()
    out.print(f"wanted replicas per rollout worker: {answer.wanted} of at most {answer.limit} (at {answer.at})")
    out.print(table)


def prune(
    runs: Annotated[list[str] | None, typer.Argument(help="runs; by default all below the root")] = None,
    checkpoints: Annotated[
        int | None,
        typer.Option("--keep-checkpoints", min=1, help="newest checkpoints of each run that stay, with the best one"),
    ] = None,
    rollout_days: Annotated[
        float | None, typer.Option("--keep-rollouts", min=0, help="age in days from which archived samples are deleted")
    ] = None,
    shelves: Annotated[
        list[Path] | None, typer.Option("--shelf", help="folder of releases, whose runs keep everything; repeatable")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="delete; without it the command only shows")] = False,
    root: Root = RUNS,
    as_json: Json = False,
) -> None:
    """Show what retention rules would delete of ended runs, and delete it with --delete.

    Metrics, configuration and records of a run always stay, and so do its newest and its best checkpoint and those for replays.

    Example: hone runs prune --keep-checkpoints 1 --keep-rollouts 30 --shelf releases/arith --delete
    """
    from hone.apps.ops.retention import Rules, surplus_of
    from hone.apps.ops.retention import delete as delete_surplus

    if checkpoints is None and rollout_days is None:
        raise HoneError(
            "no rule says what may be deleted", fix="--keep-checkpoints 1, or --keep-rollouts 30", code="E-runs"
        )
    rules = Rules(checkpoints, rollout_days, tuple(shelves or ()))
    paths = [find_run(name, root).path for name in runs] if runs else list(run_names(root).values())
    below = [path for path in paths if runs or path.resolve().is_relative_to(root.resolve())]
    every = [surplus_of(path, rules) for path in below]
    _print_surplus(every, as_json=as_json)
    if delete:
        for surplus in every:
            delete_surplus(surplus, rules)
    if not as_json:
        mib = sum(surplus.size for surplus in every) / 2**20
        typer.echo(f"{'deleted' if delete else 'would delete'}: {mib:.1f} MiB{'' if delete else '; --delete does it'}")


def _print_surplus(every: Sequence[Surplus], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "run": str(surplus.run),
                    "kept_because": surplus.kept_because,
                    "checkpoints": list(surplus.checkpoints),
                    "rollouts": [file.name for file in surplus.rollouts],
                    "bytes": surplus.size,
                }
                for surplus in every
            ]
        )
        return
    table = new_table("run", "checkpoints", "samples>", "MiB>", "all kept because")
    for surplus in every:
        steps = ", ".join(map(str, surplus.checkpoints))
        table.add_row(
            str(surplus.run), steps, str(len(surplus.rollouts)), f"{surplus.size / 2**20:.1f}", surplus.kept_because
        )
    new_console().print(table)
