"""`hone runs prune`: delete old checkpoints and samples of runs that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.cli.options import Json
from hone.cli.run_output import RootOption, new_console, new_table, print_json

if TYPE_CHECKING:
    from hone.apps.ops.retention import Surplus


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
    root: RootOption = Path("runs"),
    as_json: Json = False,
) -> None:
    """Show what retention rules would delete of ended runs, and delete it with --delete.

    Metrics, configuration and records of a run always stay, and so do its newest and its best checkpoint and those for replays.

    Example: hone runs prune --keep-checkpoints 1 --keep-rollouts 30 --shelf releases/arith --delete
    """
    from hone.apps.lab.compare import find_run, run_names
    from hone.apps.ops.retention import Rules, surplus_of
    from hone.apps.ops.retention import delete as delete_surplus
    from hone.errors import HoneError

    if checkpoints is None and rollout_days is None:
        raise HoneError(
            "no rule says what may be deleted", fix="--keep-checkpoints 1, or --keep-rollouts 30", code="E-runs"
        )
    rules = Rules(checkpoints, rollout_days, tuple(shelves or ()))
    paths = [find_run(name, root).path for name in runs] if runs else list(run_names(root).values())
    below = [path for path in paths if runs or path.resolve().is_relative_to(root.resolve())]
    every = [surplus_of(path, rules) for path in below]
    _print(every, as_json=as_json)
    if delete:
        for surplus in every:
            delete_surplus(surplus, rules)
    if not as_json:
        mib = sum(surplus.size for surplus in every) / 2**20
        typer.echo(f"{'deleted' if delete else 'would delete'}: {mib:.1f} MiB{'' if delete else '; --delete does it'}")


def _print(every: Sequence[Surplus], *, as_json: bool) -> None:
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
