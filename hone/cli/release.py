"""`hone release`: keep models that passed their gate, and choose which of them is served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import Json
from hone.cli.run_output import new_console, new_table, print_json

if TYPE_CHECKING:
    from hone.training.releases import Release

app = typer.Typer(add_completion=False, no_args_is_help=True)

SWAP_SECONDS = 3600.0
"""Time limit of a swap: loading of the model, and the end of the requests under way."""

Shelf = Annotated[Path, typer.Argument(help="folder with all releases of one model, such as releases/arith")]
Note = Annotated[str, typer.Option(help="reason, for the history")]
Server = Annotated[
    str | None, typer.Option(help="address of a `hone serve` of this shelf, which then swaps to the release")
]
Token = Annotated[str | None, typer.Option(help="API key of the server", envvar="HONE_SERVE_TOKEN")]


@app.callback()
def group() -> None:
    """Keep models that passed their gate, serve them, and roll back."""


@app.command("make")
def make(
    model: Annotated[str, typer.Argument(help="run, checkpoint, model or adapter directory")],
    shelf: Annotated[Path, typer.Option(help="folder with all releases of this model; created by the first")],
    report: Annotated[Path, typer.Option(help="report of `hone gate --output` for these weights")],
    note: Note = "",
    server: Server = None,
    token: Token = None,
) -> None:
    """Copy a model that passed its gate into a shelf, and make it the current release.

    Example: hone release make runs/arith --shelf releases/arith --report report.json
    """
    from hone.training.releases import Shelf

    releases = Shelf(shelf)
    release = releases.add(model, report, note=note)
    _print_current(releases.path, release)
    before = release.record["previous"]
    if before is not None and release.record["compared_with"] is None:
        typer.echo(f"note: the gate did not compare it with release {before} (--against {shelf}/current)", err=True)
    _swap(server, token, release.number)


@app.command("list")
def list_releases(shelf: Shelf, as_json: Json = False) -> None:
    """List the releases of a shelf, and all changes of the current one."""
    from hone.training.releases import Shelf

    releases = Shelf(shelf)
    current = releases.current
    every = releases.releases()
    if as_json:
        print_json(
            {
                "current": current.number if current else None,
                "releases": [dict(release.record) for release in every],
                "history": releases.history(),
            }
        )
        return
    table = new_table("release>", "at", "by", "run", "step>", "weights", "current", "note")
    for release in every:
        run = release.record.get("run") or {}
        table.add_row(
            *(str(release.number), release.record["at"], release.record["by"], run.get("path") or "none"),
            *(str(run.get("step") or ""), release.record["digest"][:12]),
            *("yes" if current and current.number == release.number else "", release.record["note"]),
        )
    out = new_console()
    out.print(table)
    changes = new_table("at", "event", "release>", "before>", "by", "note")
    for line in releases.history():
        changes.add_row(*(str(line[name] or "") for name in ("at", "event", "release", "before", "by", "note")))
    out.print(changes)


@app.command("show")
def show(
    shelf: Shelf,
    number: Annotated[
        int | None, typer.Argument(min=1, help="number of the release; by default the current one")
    ] = None,
) -> None:
    """Print where a release comes from, and what its gate measured, as JSON."""
    import json

    from hone.errors import ConfigError
    from hone.training.releases import GATE, Shelf

    releases = Shelf(shelf)
    release = releases.current if number is None else releases.release(number)
    if release is None:
        raise ConfigError(f"{shelf} has no current release", fix="hone release make", where="release")
    gate: dict[str, Any] = json.loads((release.path / GATE).read_text(encoding="utf-8"))
    print_json({**release.record, "gate": gate})


@app.command("rollback")
def rollback(
    shelf: Shelf,
    to: Annotated[int | None, typer.Option(min=1, help="number of the release; by default the one before")] = None,
    note: Note = "",
    server: Server = None,
    token: Token = None,
) -> None:
    """Make an earlier release the current one again, and let a server swap to it.

    Example: hone release rollback releases/arith --server http://127.0.0.1:8000
    """
    from hone.training.releases import Shelf

    releases = Shelf(shelf)
    release = releases.rollback(to=to, note=note)
    _print_current(releases.path, release)
    _swap(server, token, release.number)


@app.command("deploy")
def deploy(
    shelf: Shelf, server: Annotated[str, typer.Option(help="address of the server")], token: Token = None
) -> None:
    """Let a server swap to the current release of its shelf, without dropping a request.

    Example: hone release deploy releases/arith --server http://127.0.0.1:8000
    """
    from hone.errors import ConfigError
    from hone.training.releases import Shelf

    release = Shelf(shelf).current
    if release is None:
        raise ConfigError(f"{shelf} has no current release", fix="hone release make", where="release")
    _swap(server, token, release.number)


def _print_current(shelf: Path, release: Release) -> None:
    back = release.record["previous"]
    typer.echo(f"release {release.number} of {shelf} is current ({release.record['digest'][:12]})")
    if back is not None:
        typer.echo(f"back to release {back}: hone release rollback {shelf} --to {back}")


def _swap(server: str | None, token: str | None, number: int) -> None:
    """Let a server swap to a release, and print how long it took."""
    if server is None:
        return
    import asyncio

    from hone.errors import HoneError
    from hone.rewards.http import JsonService, ServiceError

    async def ask() -> dict[str, Any]:
        service = JsonService(server, token=token or None, timeout=SWAP_SECONDS, retries=0)
        try:
            answer: dict[str, Any] = await service.post("/release", {"release": number})
            return answer
        finally:
            await service.close()

    try:
        answer = asyncio.run(ask())
    except ServiceError as error:
        raise HoneError(
            f"the server did not swap to release {number}: {error}",
            why="it still serves the release that it served before",
            fix="see its log; then hone release deploy SHELF --server " + server,
            where=server,
        ) from error
    typer.echo(
        f"{server} serves release {answer['release']} after {answer['load_seconds']:.1f} s of loading; "
        f"{answer['finished']} requests of release {answer['before']} were finished in {answer['drain_seconds']:.1f} s"
    )
