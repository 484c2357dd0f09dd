"""Spans of text by comparing every pair of beginnings."""

from __future__ import annotations

from collections.abc import Sequence


def aligned_ends(one: Sequence[bytes], other: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return pairs of token counts after which both sides have the same text; the fewest tokens of each, and all at the end."""
    found: list[tuple[int, int]] = []
    for first in range(1, len(one) + 1):
        for second in range(1, len(other) + 1):
            text = b"".join(one[:first])
            same = text and text == b"".join(other[:second])
            new = not found or text != b"".join(one[: found[-1][0]])
            if same and new:
                found.append((first, second))
    return [*found[:-1], (len(one), len(other))]
