"""`hone audit`: the tool calls of an agent, and whether their log is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hone.cli.options import Json
from hone.cli.run_output import new_console, new_table, print_json

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    folder: Annotated[Path, typer.Argument(help="folder of the log: multi_turn.audit_dir, or hone serve --audit")],
    tool: Annotated[str | None, typer.Option(help="only calls of this tool")] = None,
    session: Annotated[str | None, typer.Option(help="only calls of this session or episode")] = None,
    last: Annotated[int, typer.Option(min=0, help="calls that are shown; 0 only verifies")] = 20,
    as_json: Json = False,
) -> None:
    """Verify the chain of every line, and show the latest calls: when, which tool, with what, and how each ended.

    The exit code is 2 if a line was changed, removed or inserted.
    """
    from hone.errors import HoneError
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
