"""Treatment of rows that have more tokens than allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hone.errors import ConfigError, DataError, did_you_mean

T = TypeVar("T")

SIDES = ("left", "right", "middle")  # parts of a row that are removed when it is too long
POLICIES = ("error", "drop", "truncate", *SIDES)


def check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"unknown policy '{policy}'", where="data.truncation", fix=did_you_mean(policy, POLICIES))


def shortened(values: list[T], limit: int, side: str) -> list[T]:
    """Return at most ``limit`` values, without those on the left or right, or in the middle.

    >>> [shortened([1, 2, 3, 4, 5], 3, side) for side in ("left", "right", "middle")]
    [[3, 4, 5], [1, 2, 3], [1, 4, 5]]
    """
    if len(values) <= limit:
        return values
    first = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return values[:first] + values[len(values) - (limit - first) :]


def overlong_rows(lengths: Sequence[int], limit: int, policy: str, *, what: str, key: str) -> set[int]:
    """Return the indices of rows longer than ``limit`` tokens.

    Args:
        policy: ``error`` raises if there is one; the others leave the rows to the caller.
        what: name of the rows in the message ("prompts").

    Raises:
        DataError: a row is too long and the policy is ``error``, or it is ``drop`` and no row would be left.
    """
    check_policy(policy)
    long = {row for row, length in enumerate(lengths) if length > limit}
    if not long or policy in ("truncate", *SIDES) or (policy == "drop" and len(long) < len(lengths)):
        return long
    ordered = sorted(lengths)
    p99 = ordered[int(0.99 * len(ordered))]
    fix = f"{key}={ordered[-1]}"
    raise DataError(
        f"{len(long)} of {len(lengths)} {what} are longer than {key}={limit} tokens "
        f"(longest {ordered[-1]}, 99th percentile {p99})",
        why="no row would be left" if policy == "drop" else "they exceed the context length that the run plans for",
        fix=fix if policy == "drop" else f"{fix}, or data.truncation=drop, or data.truncation=truncate",
    )
