"""Descriptions of the table's entries."""

from __future__ import annotations

from hone.config.check import yaml_value
from hone.config.migration.entries import Changed, Entry, Foreign, Renamed, Settled, Unsupported


def described(entry: Entry | None) -> str:
    """Return the translation of a key as a sentence."""
    match entry:
        case Renamed(to, says):
            return f"Another name of {to}" + (f": {says}." if says else ".")
        case Changed(says, _, to):
            return f"Taken as {', '.join(to)}" + (f": {says}." if says else ".") if to else f"Known: {says}."
        case Settled(says, only, instead):
            others = f" Other values than {yaml_value(list(only))} are not supported yet: {instead}." if only else ""
            return f"Always so here: {says}.{others}"
        case Unsupported(what, instead, _):
            return f"Not supported yet: {what}. Instead: {instead}."
        case Foreign(reason):
            return f"No meaning here: {reason}."
    return "Not known."


def kind(entry: Entry) -> str:
    """Return the heading under which the documentation lists an entry."""
    match entry:
        case Renamed() | Changed():
            return "Other names"
        case Settled():
            return "Always so here"
        case Unsupported():
            return "Not supported yet"
        case Foreign():
            return "Without meaning here"
