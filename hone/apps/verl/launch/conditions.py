"""Evaluation of a shell script's conditions that depend only on the script."""

from __future__ import annotations

import fnmatch
import operator
import re

from hone.apps.verl.launch.words import UNDECIDED, is_open, mark, open_names

_NUMBERS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}


def holds(words: list[str]) -> bool | None:
    """Return whether ``[ words ]`` is true; None when it depends on the machine (a file's existence, a program's output).

    A variable that the script does not set counts as unset for ``-z`` and ``-n``, and as undecided for comparisons.
    """
    for joint, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if joint in words:
            at = words.index(joint)
            sides = (holds(words[:at]), holds(words[at + 1 :]))
            return decides if decides in sides else None if None in sides else not decides
    match words:
        case []:
            return False
        case ["!", *rest]:
            truth = holds(rest)
            return None if truth is None else not truth
        case ["-z", text]:
            return _is_empty(text)
        case ["-n", text] | [text]:
            empty = _is_empty(text)
            return None if empty is None else not empty
        case [left, "=" | "==" | "!=" | "=~" as how, right]:
            return _compared(left, how, right)
        case [left, how, right] if how in _NUMBERS:
            numbers = [re.fullmatch(r"\s*[-+]?\d+\s*", side) for side in (left, right)]
            return _NUMBERS[how](int(left), int(right)) if all(numbers) else None
    return None


def _compared(left: str, how: str, right: str) -> bool | None:
    if is_open(left) or is_open(right):
        return None
    if how == "=~":
        try:
            return re.search(right, left) is not None
        except re.error:
            return None
    return fnmatch.fnmatchcase(left, right) == (how != "!=")


def _is_empty(text: str) -> bool | None:
    if not is_open(text):
        return text == ""
    name = open_names(text)[0]
    return True if text == mark(name) and name not in UNDECIDED else None
