"""The ``exit`` at which a launch script ends before it starts training."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tree_sitter import Node

from hone.apps.verl.launch.grammar import text_of

_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)")
_CONDITIONS = {"if_statement": "condition", "elif_clause": "condition", "case_statement": "value"}


@dataclass(frozen=True)
class End:
    """The ``exit`` at which a script ends before its last line."""

    line: int  # its line
    command: str  # its text, such as "exit 1"
    variables: tuple[str, ...]  # names in the conditions around it


def names_around(node: Node) -> tuple[str, ...]:
    """Return the names of variables in the conditions around a command, the innermost first."""
    names: list[str] = []
    place: Node | None = node
    while place is not None:
        if place.type in _CONDITIONS:
            names += [
                name
                for part in place.children_by_field_name(_CONDITIONS[place.type])
                for name in _NAME.findall(text_of(part))
            ]
        elif place.type == "list":  # [ -n "$NAME" ] || exit 1
            names += _NAME.findall(text_of(place))
        place = place.parent
    return tuple(dict.fromkeys(names))
