"""How the process gives memory back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def trim_memory() -> bool:
    """Give the holes in the process's heap back to the system; returns whether that is possible here (glibc).

    Micro-batches differ in length, oneDNN prepares something for each length, and what they leave behind fits no later one:
    without this the process grows with every new length, far beyond what it ever uses at once. It costs some milliseconds; once an update is enough.
    """
    trim = _malloc_trim()
    if trim is None:
        return False
    trim(0)
    return True


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
