"""A command group that imports a command when it is invoked, so that ``hone --help`` stays fast."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


class Entry(NamedTuple):
    """Module of a command, and its line in ``--help``."""

    module: str
    help: str


class LazyGroup(TyperGroup):
    """A group for a table of :class:`Entry`; subclasses set ``table``.

    Listing and suggesting names uses placeholders with the help line; the module is imported when its command runs.
    """

    table: dict[str, Entry] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the placeholder of a command; None for an unknown name."""
        entry = self.table.get(cmd_name)
        return TyperCommand(cmd_name, help=entry.help) if entry else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import and return the command that ``args`` names."""
        self.commands = {name: self.get_command(ctx, name) for name in self.table}  # for suggestions of names
        name, stand_in, rest = super().resolve_command(ctx, args)
        return (name, load(self.table[name].module), rest) if stand_in and name else (name, stand_in, rest)


def load(module: str) -> Any:
    """Import ``module`` and return the command of its ``app``.

    An app with a callback and no commands is a single command; typer would make it a group, which accepts no options after
    its first argument.
    """
    app: typer.Typer = importlib.import_module(module).app
    callback = app.registered_callback
    if callback is None or app.registered_commands or app.registered_groups:
        return get_command(app)
    single = typer.Typer(add_completion=False)
    single.command()(callback.callback)  # type: ignore[type-var]
    return get_command(single)
