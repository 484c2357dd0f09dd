"""`hone env`: which environments there are, and what they need."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from hone.cli.options import Json, new_group
from hone.cli.output import new_console, new_table, print_json

app = new_group("List the environments that answer a model's turns.")


@app.command("list")
def list_environments(
    python: Annotated[
        str | None, typer.Option(help="another Python in which packages may be, such as ~/textarena/bin/python")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the environments: the task of `hone data make` that makes their rows, their package, its version or how to get it.

    Example: hone env list
    """
    from hone.agents.environments.listing import environments

    listed = environments(python)
    if as_json:
        print_json([dataclasses.asdict(one) for one in listed])
        return
    table = new_table("rows", "package", "installed")
    for one in listed:
        table.add_row(one.rows, one.package or "built in", one.installed or one.install or "yes")
    new_console().print(table)
