"""Output of the `hone runs` commands: plain tables and JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def new_console() -> Console:
    """Return a console of the terminal's width."""
    from rich.console import Console

    return Console()


def new_table(*columns: str) -> Any:
    """Return a plain table; a heading that ends in ``>`` marks a right-aligned column."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        result.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return result


def print_json(value: Any) -> None:
    """Print a value as indented JSON; arrays and numbers that JSON lacks are converted."""
    from hone.insight.run_files import jsonable

    typer.echo(json.dumps(jsonable(value), indent=2, ensure_ascii=False))
