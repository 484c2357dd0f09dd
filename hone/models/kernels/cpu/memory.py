"""Keep freed memory in the process between updates, and trim the heap when it fragments.

Every update allocates and frees the same large blocks. By default the C library maps each one again, and the kernel zeroes it page by
page: a third of an update's time. So freed blocks stay in the process. But micro-batches differ in length and oneDNN caches a
primitive for each length, so the heap fragments. It is trimmed when it has grown well beyond what an update needs.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt (malloc.h)."""
_LARGEST_ON_HEAP = 32 << 20
"""Bytes of the largest block that glibc allows on the heap."""
_GROWTH, _SLACK = 1.25, 128 << 20
_STATM, _STATUS = Path("/proc/self/statm"), Path("/proc/self/status")


def keep_freed_memory() -> bool:
    """Keep freed blocks in the process for the next update; returns whether the C library supports that (glibc)."""
    libc = _glibc()
    if libc is None:
        return False
    kept = libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1), libc.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
    return all(kept)


def trim_memory() -> bool:
    """Return free heap memory to the system; returns whether the C library supports that (glibc)."""
    libc = _glibc()
    if libc is None:
        return False
    libc.malloc_trim(0)
    return True


class HeapWatch:
    """Keep freed memory for the next update, and trim the heap when the process has grown. Call it after every update.

    The first update after a trim sets the baseline. Growth by more than a quarter and 128 MiB is fragmentation or longer
    micro-batches; a trim resolves either.
    """

    def __init__(self) -> None:
        keep_freed_memory()
        self.trims = 0  # number of trims so far
        self._settled: int | None = None

    def __call__(self) -> None:
        """Compare resident memory with the baseline, and trim if it has grown."""
        if _glibc() is None:
            return
        resident = resident_memory()
        if self._settled is None:
            self._settled = resident
        elif resident > _GROWTH * self._settled + _SLACK:
            trim_memory()
            self.trims += 1
            self._settled = None


@cache
def heap_watch() -> HeapWatch:
    return HeapWatch()


def resident_memory() -> int:
    """Resident bytes of this process now (Linux)."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def peak_memory() -> int:
    """Peak resident bytes of this process (Linux)."""
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return resident_memory()


class MemoryUse:
    """Memory of this process since before its models were built; create it then, call it at any later time."""

    def __init__(self) -> None:
        self.bare = resident_memory() if _STATM.exists() else 0  # resident bytes at creation

    def __call__(self) -> dict[str, float]:
        """Return GiB: ``bare`` and ``peak`` of host memory, and ``device_peak`` on a GPU."""
        import torch

        usage = {"bare": self.bare / 2**30, "peak": (peak_memory() if _STATM.exists() else 0) / 2**30}
        if torch.cuda.is_available():
            usage["device_peak"] = torch.cuda.max_memory_allocated() / 2**30
        return {name: round(value, 4) for name, value in usage.items()}


@cache
def _glibc() -> Any:
    """The C library if it is glibc, else None."""
    if sys.platform != "linux":
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
    except OSError:
        return None
