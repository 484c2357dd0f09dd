"""How a process on the CPU holds on to memory, and when it gives it back to the system.

Every update takes and frees the same large blocks. By default the C library maps each anew, and the system hands it over page
by page, zeroed: a third of an update's time. So freed blocks stay in the process. But micro-batches differ in length, oneDNN
prepares something for each length, and what that leaves behind fits no later block: the heap grows holes. So it is trimmed,
not after every update, but whenever it has grown well beyond what an update needs.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of mallopt's settings (malloc.h)."""
_LARGEST_ON_HEAP = 32 << 20
"""Bytes; the most that glibc lets a block on the heap have."""
_GROWTH, _SLACK = 1.25, 128 << 20
_STATM, _STATUS = Path("/proc/self/statm"), Path("/proc/self/status")


def keep_freed_memory() -> bool:
    """Let freed blocks stay in the process, for the next update; returns whether that is possible here (glibc)."""
    libc = _glibc()
    if libc is None:
        return False
    kept = libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1), libc.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
    return all(kept)


def trim_memory() -> bool:
    """Give all holes in the process's heap back to the system; returns whether that is possible here (glibc)."""
    libc = _glibc()
    if libc is None:
        return False
    libc.malloc_trim(0)
    return True


class HeapWatch:
    """Keeps freed memory for the next update, and trims the heap when the process has grown: call it after every update.

    The first update after a trim shows what one needs; growth beyond a quarter more (and 128 MiB) is holes, or longer
    micro-batches, which the next trim tells apart.

    Attributes:
        trims: how often it trimmed.
    """

    def __init__(self) -> None:
        keep_freed_memory()
        self.trims = 0
        self._settled: int | None = None

    def __call__(self) -> None:
        """Look at the resident memory, and trim if it has grown."""
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
    """The one of this process."""
    return HeapWatch()


def resident_memory() -> int:
    """Bytes of this process that are in memory now (Linux)."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def peak_memory() -> int:
    """Most bytes of this process that have been in memory at a time (Linux)."""
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return resident_memory()


class MemoryUse:
    """The memory of this process, from before its models are made: made at that moment, asked at any later one.

    Attributes:
        bare: resident bytes at the beginning.
    """

    def __init__(self) -> None:
        self.bare = resident_memory() if _STATM.exists() else 0

    def __call__(self) -> dict[str, float]:
        """GiB: ``bare`` and ``peak`` of the host's memory, on a GPU ``device_peak`` of its own."""
        import torch

        found = {"bare": self.bare / 2**30, "peak": (peak_memory() if _STATM.exists() else 0) / 2**30}
        if torch.cuda.is_available():
            found["device_peak"] = torch.cuda.max_memory_allocated() / 2**30
        return {name: round(value, 4) for name, value in found.items()}


@cache
def _glibc() -> Any:
    """The C library, if it is glibc."""
    if sys.platform != "linux":
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
    except OSError:
        return None
