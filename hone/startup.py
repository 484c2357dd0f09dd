"""A quick start of a process: while modules are imported, Python need not look for garbage among them again and again."""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()[0]
_RARELY = 50_000
"""New objects between two searches. An import makes a million that stay; searching them took a sixth of every command's start."""


def collect_rarely() -> None:
    """Search for garbage seldom, from now until :func:`collect_as_usual`."""
    gc.set_threshold(_RARELY)


def collect_as_usual() -> None:
    """Search as often as Python does by itself: what comes now makes garbage, such as tensors that refer to each other.

    Without :func:`collect_rarely` before it, it changes nothing.
    """
    if gc.get_threshold()[0] == _RARELY:
        gc.set_threshold(_USUAL)
