"""Helpers for the child processes of an engine."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from typing import NoReturn

SAMPLED_FROM = "hone_sampling_log_probs"
"""Key of SGLang's custom info with log-probs under the distribution sampled from, after temperature and truncation."""


_PR_SET_PDEATHSIG = 1
LOST = 70
"""Exit code of a server whose engine has ended."""


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def give_up() -> NoReturn:
    """End the server at once, because its engine has ended; clients notice the closed connection."""
    os._exit(LOST)


def binding(cpus: Sequence[int], workers: int) -> str:
    """Return the CPU cores of each worker in vLLM's format. vLLM's default, one NUMA node each, fails with too few nodes.

    Without ``cpus`` all cores of this process are divided; with fewer cores than workers some share the last core.
    """
    cores = list(cpus) or sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // workers)
    return "|".join(",".join(map(str, cores[i * share : (i + 1) * share] or cores[-1:])) for i in range(workers))
