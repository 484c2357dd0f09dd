"""Pieces of text between marks."""

from __future__ import annotations

from collections.abc import Iterator


def blocks(text: str, begin: str, end: str) -> Iterator[tuple[str, bool]]:
    """Yield what stands between ``begin`` and ``end``, and whether it was closed; what stands outside is left out."""
    _, opened, rest = text.partition(begin)
    while opened:
        body, closed, behind = rest.partition(end)
        yield body, bool(closed)
        _, opened, rest = behind.partition(begin)
