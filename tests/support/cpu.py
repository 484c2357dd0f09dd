"""Seconds of processor that this process and all that it started have taken: on a busy machine the same as on a quiet one (Linux)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Return the seconds of this process, of its children that have ended, and of its living descendants with theirs."""
    ended = os.times()
    living = sum(map(_seconds_of, _descendants(os.getpid()))) if sys.platform == "linux" else 0.0
    return time.process_time() + ended.children_user + ended.children_system + living


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for thread in _listed(PROC / str(pid) / "task"):
        for child in _text(PROC / str(pid) / "task" / thread / "children").split():
            found += [int(child), *_descendants(int(child))]
    return found


def _seconds_of(pid: int) -> float:
    fields = _text(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS  # utime, stime, and those of its ended children


def _listed(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:  # it has ended
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
