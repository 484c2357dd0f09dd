"""Processes that an engine starts in turn."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
LOST = 70
"""Exit code of a server whose engine is gone."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def give_up() -> NoReturn:
    """End the server at once: its engine is gone, and clients learn it from the connection."""
    os._exit(LOST)


def binding(cpus: Sequence[int], workers: int) -> str:
    """Cores of each worker, as vLLM writes them; by itself it gives each a NUMA node, and fails where there are fewer.

    Args:
        cpus: to divide; none means all that this process has.
        workers: how many there are; where cores are fewer, some share the last one.
    """
    cores = list(cpus) or sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // workers)
    return "|".join(",".join(map(str, cores[i * share : (i + 1) * share] or cores[-1:])) for i in range(workers))
