"""The one protocol between stages: a batch of sequences as named columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.data.ragged import Ragged

Column = Tensor | Ragged | list


class Batch:
    """Named columns of equal length ``B``, and metadata of the whole batch.

    A column is a dense tensor ``[B, ...]``, a :class:`Ragged` (token columns: no padding is stored or sent), or a list of
    ``B`` Python objects. Operations return new batches and share storage where they can; columns are never changed in place.

    >>> batch = Batch({"response_ids": Ragged.from_rows([[5, 6], [7]]), "uid": ["a", "b"]}, step=3)
    >>> len(batch), batch.meta
    (2, {'step': 3})
    >>> batch.reorder([1, 0])["uid"]
    ['b', 'a']

    Args:
        columns: name to column.
        meta: anything that belongs to the batch as a whole.

    Raises:
        ValueError: columns differ in length.
    """

    def __init__(self, columns: Mapping[str, Column], **meta: Any) -> None:
        self._columns: dict[str, Column] = dict(columns)
        self.meta: dict[str, Any] = meta
        sizes = {name: len(column) for name, column in self._columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns differ in length: {sizes}")
        self._size = next(iter(sizes.values()), 0)

    # access ----------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"the batch has no column '{name}'; it has {sorted(self._columns)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def names(self) -> list[str]:
        """Names of all columns."""
        return list(self._columns)

    def __len__(self) -> int:
        """Number of rows ``B`` (not of columns)."""
        return self._size

    def ragged(self, name: str) -> Ragged:
        """Column ``name``, which must be ragged."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise TypeError(f"column '{name}' is a {type(column).__name__}, not ragged")
        return column

    def tensor(self, name: str) -> Tensor:
        """Column ``name``, which must be a dense tensor."""
        column = self[name]
        if not isinstance(column, Tensor):
            raise TypeError(f"column '{name}' is a {type(column).__name__}, not a tensor")
        return column

    def objects(self, name: str) -> list:
        """Column ``name``, which must be a list of Python objects."""
        column = self[name]
        if not isinstance(column, list):
            raise TypeError(f"column '{name}' is a {type(column).__name__}, not a list")
        return column

    # columns ---------------------------------------------------------------------------------------------------------

    def with_columns(self, **columns: Column) -> Batch:
        """Add or replace columns."""
        return Batch({**self._columns, **columns}, **self.meta)

    def select(self, *names: str) -> Batch:
        """Only these columns."""
        return Batch({name: self[name] for name in names}, **self.meta)

    def reorder(self, rows: Sequence[int] | Tensor) -> Batch:
        """The given rows in the given order; also takes a subset, and repeats."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        if len(index) and not (int(index.min()) > -1 and int(index.max()) < len(self)):
            raise IndexError(f"rows run from {int(index.min())} to {int(index.max())}, the batch has {len(self)}")
        return Batch({name: _take(column, index) for name, column in self._columns.items()}, **self.meta)


def _take(column: Column, rows: Tensor) -> Column:
    if isinstance(column, Ragged):
        return column.select(rows)
    if isinstance(column, Tensor):
        return column[rows.to(column.device)]
    return [column[row] for row in rows.tolist()]
