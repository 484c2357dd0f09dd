"""Processes that an engine starts in turn."""

from __future__ import annotations

import ctypes
import os
import signal
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
