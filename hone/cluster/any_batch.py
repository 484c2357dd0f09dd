"""Batch of a program, wherever its columns are."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class AnyBatch(Protocol):
    """Batch with columns here (:class:`~hone.data.batch.Batch`) or elsewhere.

    Columns elsewhere are a :class:`~hone.cluster.remote_batch.RemoteBatch`. Both have these operations.
    """

    @property
    def uids(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object) -> bool: ...
    def names(self) -> list[str]: ...
    def select(self, *names: str) -> AnyBatch: ...
    def rename(self, names: Mapping[str, str]) -> AnyBatch: ...
    def updated(self, other: Any) -> AnyBatch: ...
    def reorder(self, rows: Sequence[int]) -> AnyBatch: ...
    def slice(self, start: int, stop: int) -> AnyBatch: ...


def concat_batches(batches: Sequence[AnyBatch]) -> AnyBatch:
    """Concatenate the rows of batches, in order."""
    kind: Any = type(batches[0])
    return kind.concat(batches)


def rows_of(keys: Iterable[Key]) -> dict[Key, list[int]]:
    """Return the rows of each key, such as a prompt's uid, in order of first occurrence."""
    rows: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows
