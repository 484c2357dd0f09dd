"""Words of a launch script: literal text, with marks in place of values that only the machine knows.

A variable that the script does not set, or the output of a program, stays open. It is kept as a mark inside the text, which
:func:`opened` turns into an interpolation that reads the environment variable of that name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARK = re.compile("\ue000([^\ue001\ue002]*)\ue002?\ue001")
_SETTING = re.compile(r"(?:\+{0,2}|~)[A-Za-z_]\w*(?:[.@/][\w*-]+)+=|~[A-Za-z_][\w.]*$")
ALWAYS_SET = ("HOME", "USER")
UNDECIDED = ("OUTPUT", "ARGUMENTS")
"""Marks that are not variables: a program's output, the number of arguments."""


@dataclass(frozen=True)
class Argument:
    """One expanded word of a command, and the line it is written on."""

    text: str
    line: int


@dataclass(frozen=True)
class Started:
    """A command that the script would start."""

    words: tuple[Argument, ...]
    environment: tuple[str, ...]  # names of variables set for this command alone
    line: int  # where the command begins


@dataclass(frozen=True)
class Trouble:
    """A line, and a remark about it."""

    line: int
    what: str


def is_setting(text: str) -> bool:
    """Return whether a word has the form ``block.key=value``, with or without one of Hydra's prefixes."""
    return _SETTING.match(text) is not None


def mark(name: str, *, computed: bool = False) -> str:
    """Return the text that stands for a value which the script does not state; ``computed``: a program's output sets it."""
    return f"\ue000{name}\ue002\ue001" if computed else f"\ue000{name}\ue001"


def is_open(text: str) -> bool:
    """Return whether a text contains a mark."""
    return "\ue000" in text


def open_names(text: str) -> list[str]:
    """Return the names of the marks in a text."""
    return _MARK.findall(text)


def opened(text: str) -> str:
    """Return the text with each mark as an interpolation: the environment variable, or its name where it is not set.

    >>> opened(f"{mark('DATA')}/train.parquet")
    '${oc.env:DATA,DATA}/train.parquet'
    """
    return _MARK.sub(lambda m: f"${{oc.env:{m[1]}}}" if m[1] in ALWAYS_SET else f"${{oc.env:{m[1]},{m[1]}}}", text)


def shown(text: str) -> str:
    """Return the text with each mark as a shell script writes it.

    >>> shown(f"{mark('DATA')}/train.parquet")
    '$DATA/train.parquet'
    """
    return _MARK.sub(lambda m: "$(...)" if m[1] in UNDECIDED else f"${m[1]}", text)
