"""`hone gate` and `hone release`: whether a model passes its checks, and which of those that passed is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import ComputeDtype, Dtype, Json, new_group
from hone.cli.output import new_console, new_table, print_json
from hone.errors import ConfigError, HoneError

if TYPE_CHECKING:
    from hone.apps.ops.gate import Verdict
    from hone.training.releases import Release


REFUSED = 4
"""Exit code of a model that does not pass."""
GATE_PATIENCE = 30.0
"""Seconds that the command waits for the webhook."""


def gate(
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
    from hone.apps.ops.gate import read_suite, run_gate
    from hone.insight.webhook import check_address

    console = new_console()
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
    table = new_table("check", "condition", "measured", "bound", "verdict", "about")
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


app = new_group("Keep models that passed their gate, serve them, and roll back.")

SWAP_SECONDS = 3600.0
"""Time limit of a swap: loading of the model, and the end of the requests under way."""

Shelf = Annotated[Path, typer.Argument(help="folder with all releases of one model, such as releases/arith")]
Note = Annotated[str, typer.Option(help="reason, for the history")]
Server = Annotated[
    str | None, typer.Option(help="address of a `hone serve` of this shelf, which then swaps to the release")
]
Token = Annotated[str | None, typer.Option(help="API key of the server", envvar="HONE_SERVE_TOKEN")]


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
