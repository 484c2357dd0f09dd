"""What happens to rows that are too long."""

from __future__ import annotations

from collections.abc import Sequence

from hone.errors import DataError


def check_lengths(lengths: Sequence[int], limit: int, policy: str, *, key: str, where: str) -> list[bool]:
    """Say which rows are too long.

    Args:
        lengths: tokens of each row.
        limit: most tokens allowed.
        policy: ``error``, ``drop`` or ``truncate``.
        key: the configuration key of the limit, for the message.
        where: what is being read, for the message.

    Returns:
        For every row whether it exceeds the limit.

    Raises:
        DataError: some do and the policy is ``error``, or all do and it is ``drop``.
    """
    over = [length > limit for length in lengths]
    count = sum(over)
    if count == 0:
        return over
    ordered = sorted(lengths)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    figures = (
        f"{count} of {len(lengths)} rows have more than {limit} tokens (99th percentile {p99}, longest {ordered[-1]})"
    )
    if policy == "error":
        raise DataError(
            figures,
            where=where,
            why="cutting them silently could remove what the answer depends on",
            fix=f"{key}={ordered[-1]}, or data.truncation=drop, or data.truncation=truncate",
            code="R45",
        )
    if policy == "drop" and count == len(lengths):
        raise DataError(f"{figures}: none is left", where=where, fix=f"{key}={ordered[-1]}", code="R46")
    return over
