"""`hone archive`, `hone audit` and `hone view`: rollouts in and out of the archive, logs of tool calls, runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hone.apps.lab.compare import find_run
from hone.cli.options import RUNS, Json, Root, RunName, Trust, new_group
from hone.cli.output import new_console, new_table, print_json
from hone.errors import HoneError

app = new_group("Import rollouts of other programs into the archive of rollouts, and export an archive as JSON lines.")


@app.command("import")
def import_source(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="file or folder with rollouts")],
    out: Annotated[Path, typer.Option("--out", help="run directory to write")],
    name: Annotated[str, typer.Option("--format", help="auto, verl, trl, prime-rl, slime, miles or jsonl")] = "auto",
) -> None:
    """Convert rollouts of verl, TRL, prime-rl, slime, miles or plain JSON lines to a run directory.

    Example: hone archive import outputs/rollouts --out runs/theirs
    """
    from hone.apps.lab.importers import import_rollouts

    result = import_rollouts(source, out, name)
    typer.echo(f"{out}: {sum(result.rows.values())} sequences of {len(result.rows)} steps ({result.format})")
    if result.validation:
        typer.echo(f"{out}/validation: {sum(result.validation.values())} of {len(result.validation)} validations")


@app.command("export")
def export(
    run: RunName,
    out: Annotated[Path, typer.Option("--out", help="file of JSON lines to write")],
    step: Annotated[int | None, typer.Option("--step", help="step; by default all")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="validation samples instead of rollouts")] = False,
    root: Root = RUNS,
) -> None:
    """Write the sequences of a run as JSON lines, one object with all columns per sequence.

    Example: hone archive export runs/hone/demo --step 10 --out step_10.jsonl
    """
    from hone.apps.lab.importers.jsonl import export_records

    folder = find_run(run, root).path / ("validation" if validation else "rollouts")
    typer.echo(f"{out}: {export_records(folder, out, step)} sequences")


def audit(
    folder: Annotated[Path, typer.Argument(help="folder of the log: multi_turn.audit_dir, or hone serve --audit")],
    tool: Annotated[str | None, typer.Option(help="only calls of this tool")] = None,
    session: Annotated[str | None, typer.Option(help="only calls of this session or episode")] = None,
    last: Annotated[int, typer.Option(min=0, help="calls that are shown; 0 only verifies")] = 20,
    as_json: Json = False,
) -> None:
    """Verify the chain of every line, and show the latest calls: when, which tool, with what, and how each ended.

    The exit code is 2 if a line was changed, removed or inserted.
    """
    from hone.insight.audit import read_audit

    calls: list[dict[str, Any]] = []
    broken: list[str] = []
    count = 0
    open_calls: dict[tuple[Path, Any], dict[str, Any]] = {}
    for line in read_audit(folder):
        count += 1
        record = dict(line.record)
        if line.problem:
            broken.append(f"{line.file.name}:{line.number}: {line.problem}")
        key = (line.file, record.get("call"))
        if record.get("event") == "end":
            open_calls.pop(key, {}).update({name: record[name] for name in ("status", "seconds")})
        elif record.get("event") in ("call", "served"):
            call = record | {"status": "client" if record["event"] == "served" else "not ended"}
            open_calls[key] = call
            if tool in (None, call["tool"]) and session in (None, call.get("session") or call.get("episode")):
                calls.append(call)
    calls.sort(key=lambda call: str(call["at"]))
    shown = calls[-last:] if last else []
    if as_json:
        print_json({"lines": count, "calls": len(calls), "broken": broken, "shown": shown})
    else:
        table = new_table("at", "session or episode", "tool", "arguments", "status", "seconds>")
        for call in shown:
            seconds, name = call.get("seconds"), call.get("session") or call.get("episode")
            words = (
                call["at"],
                name,
                call["tool"],
                call["arguments"],
                call["status"],
                "" if seconds is None else seconds,
            )
            table.add_row(*(str(word)[:80] for word in words))
        out = new_console()
        if shown:
            out.print(table)
        out.print(f"{count} lines, {len(calls)} calls, {len(broken)} breaks of the chain")
    if broken:
        raise HoneError(
            f"{len(broken)} lines break the chain, the first at {broken[0]}",
            why="the log does not show what happened",
            fix="compare it with a copy of the files",
            where=str(folder),
        )


def view(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="run directories, or names below the root; by default all below it"),
    ] = None,
    root: Root = RUNS,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0 takes a free one")] = 8750,
    token: Annotated[
        str | None,
        typer.Option(
            help="access token; by default a new one, which makes old links ask again", envvar="HONE_VIEW_TOKEN"
        ),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="print the address, open no browser")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", help="write one HTML file to send to a colleague, and start no server")
    ] = None,
    query: Annotated[
        str, typer.Option("--filter", help="groups to export, such as 'score<0.5'; by default those of the newest step")
    ] = "",
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward", help="FILE:NAME of a function that the page may score answers with; repeat for several"
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Look at runs in a browser: curves, groups of answers, tokens, episodes, comparisons.

    Example: hone view runs/hone/demo
    """
    from hone.apps.lab.viewer.command import ViewRequest, view

    view(ViewRequest(runs or (), root, host, port, token, not no_browser, export, query, reward or ()))
