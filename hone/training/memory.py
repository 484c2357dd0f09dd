"""How the process gives memory back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20


@cache
def keep_freed_memory() -> bool:
    """Let the process keep the memory that it frees, for the next step; returns whether that could be arranged.

    glibc hands large blocks back to the system as soon as they are free, and a training step on the CPU, which makes and
    frees the same large tensors again and again, then spends a tenth of its time on fresh pages. The process holds what
    it needed at its peak either way. Elsewhere than on glibc nothing is done.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
