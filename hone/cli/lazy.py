"""A command group whose commands are imported when they are invoked, so that ``hone --help`` stays fast."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


class Entry(NamedTuple):
    """Where a command lives and what its line in ``--help`` says."""

    module: str
    help: str


class LazyGroup(TyperGroup):
    """A group over a table of :class:`Entry`; subclasses set ``table``.

    Listing and suggesting names uses stand-ins that hold the help line only; the module is imported when its command is
    resolved to run.
    """

    table: dict[str, Entry] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the stand-in of a command, None when there is none of that name."""
        entry = self.table.get(cmd_name)
        return TyperCommand(cmd_name, help=entry.help) if entry else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that ``args`` names, imported."""
        self.commands = {name: self.get_command(ctx, name) for name in self.table}  # what "did you mean" looks at
        name, stand_in, rest = super().resolve_command(ctx, args)
        return (name, load(self.table[name].module), rest) if stand_in and name else (name, stand_in, rest)


def load(module: str) -> Any:
    """Import ``module`` and return the command that its ``app`` stands for.

    An app with a callback and no commands is a single command; typer alone would make it a group, which takes no options
    after its first argument.
    """
    app: typer.Typer = importlib.import_module(module).app
    callback = app.registered_callback
    if callback is None or app.registered_commands or app.registered_groups:
        return get_command(app)
    single = typer.Typer(add_completion=False)
    single.command()(callback.callback)  # type: ignore[type-var]
    return get_command(single)
