"""`hone view`: look at runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.options import Trust

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="run directories, or names below the root; by default all below it"),
    ] = None,
    root: Annotated[Path, typer.Option("--root", help="folder that holds the runs")] = Path("runs"),
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
