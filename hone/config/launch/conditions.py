"""Whether a condition of a shell script holds, where the script itself decides it."""

from __future__ import annotations

import fnmatch
import re

from hone.config.launch.expansion import UNDECIDED, is_open, mark, open_names

_NUMBERS = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}


def holds(words: list[str]) -> bool | None:
    """Tell whether ``[ words ]`` is true; None when only the machine knows (a file's existence, a program's output).

    A variable that the script leaves open counts as unset for ``-z`` and ``-n``, and as undecided for comparisons.
    """
    if not words:
        return False
    for joint in ("||", "-o"):
        if joint in words:
            at = words.index(joint)
            return _either(holds(words[:at]), holds(words[at + 1 :]))
    for joint in ("&&", "-a"):
        if joint in words:
            at = words.index(joint)
            left, right = holds(words[:at]), holds(words[at + 1 :])
            return _negated(_either(_negated(left), _negated(right)))
    match words:
        case ["!", *rest]:
            return _negated(holds(rest))
        case ["-z", text]:
            return _is_empty(text)
        case ["-n", text] | [text]:
            return _negated(_is_empty(text))
        case ["-v", _]:
            return None
        case [left, "=" | "==" | "!=" | "=~" as how, right]:
            return _compared(left, how, right)
        case [left, how, right] if how in _NUMBERS:
            try:
                return bool(_NUMBERS[how](int(left), int(right)))
            except ValueError:
                return None
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
    (name, *others) = open_names(text)
    return True if text == mark(name) and name not in UNDECIDED and not others else None


def _negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def _either(left: bool | None, right: bool | None) -> bool | None:
    if left or right:
        return True
    return None if left is None or right is None else False
