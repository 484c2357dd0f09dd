"""Which tests of a stage run, from what they are about and what changed.

The marks ``long``, ``learn``, ``simulated_cuda`` and ``application`` name the paths that a test is about:

    @pytest.mark.long("hone/cluster", "hone/trainers/rl.py")

With a list of changed paths such a test runs if one of them is below a path of its marks, is the test's own file, or is a module of
``tests/support`` that this file imports. Of the others a part runs, another one for another commit. Without a list every test runs.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABOUT = ("long", "learn", "simulated_cuda", "application")
"""Marks whose arguments are paths."""
_WHOLE = re.compile(rf"^pytestmark = pytest\.mark\.({'|'.join(ABOUT)})\(([^()]*)\)", re.M)

CORE = tuple(
    f"hone/{name}"
    for name in [
        "algorithms",
        "config",
        "data",
        "models",
        "generation",
        "rewards",
        "agents",
        "training",
        "cluster",
        "trainers",
    ]
)
"""What every program is built on: one long test of each program is about all of it."""


def paths_of(item: pytest.Item) -> list[str] | None:
    """Return the paths that a test is about; None for one that always runs."""
    marks = [mark for name in ABOUT for mark in item.iter_markers(name)]
    return [path for mark in marks for path in mark.args] if marks else None


def is_about(item: pytest.Item, changed: Sequence[str]) -> bool:
    """Return whether a test is about one of the changed paths."""
    return _is_file_about(item.path, paths_of(item) or (), changed)


def left_out(path: Path, markers: str, changed: Sequence[str] | None, part: str) -> bool:
    """Return whether no test of a file can be chosen, as its ``pytestmark`` says: then nobody needs to import it.

    Args:
        path: the file.
        markers: expression of markers that chooses tests.
        changed: paths; None for no choice by them.
        part: "K/N" of the tests that are about something else; "0/1" for none.
    """
    found = _WHOLE.search(path.read_text())
    if found is None:
        return False
    mark, paths = found[1], re.findall(r'"([^"]+)"', found[2])
    if mark != "application":
        return f"not {mark}" in markers
    return changed is not None and part == "0/1" and "*" not in found[2] and not _is_file_about(path, paths, changed)


def _is_file_about(path: Path, paths: Sequence[str], changed: Sequence[str]) -> bool:
    mine = (*paths, str(path.relative_to(ROOT)), *_support(path))
    return any(path == one or path.startswith(f"{one}/") for path in changed for one in mine)


@functools.cache
def _support(path: Path) -> tuple[str, ...]:
    names = re.findall(r"^\s*from support\.([\w.]+) import|^\s*import support\.([\w.]+)", path.read_text(), re.M)
    return tuple(f"tests/support/{(a or b).replace('.', '/')}{end}" for a, b in names for end in (".py", ""))


def chosen(item: pytest.Item, changed: Sequence[str] | None, part: str) -> bool:
    """Return whether a test runs.

    Args:
        item: the test.
        changed: paths; None for no choice by them.
        part: "K/N", part of the tests with a path that nothing else chooses.
    """
    if paths_of(item) is None or (changed is not None and is_about(item, changed)):
        return True
    number, parts = map(int, part.split("/"))
    return zlib.crc32(item.nodeid.encode()) % parts == number - 1
