"""A ragged column: rows of different lengths stored end to end, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """``B`` rows of different lengths: their values end to end, and the offset of each row.

    >>> column = Ragged.from_rows([[1, 2, 3], [4]])
    >>> column.values.tolist(), column.offsets.tolist()
    ([1, 2, 3, 4], [0, 3, 4])
    >>> column.select([1, 0]).to_lists()
    [[4], [1, 2, 3]]
    """

    values: Tensor  # ``[N, ...]``, all rows end to end; ``N`` is the sum of the lengths
    offsets: Tensor  # ``[B + 1]`` int64 on the CPU; row i is ``values[offsets[i]:offsets[i + 1]]``

    def __post_init__(self) -> None:
        if self.offsets.dim() != 1 or self.offsets.numel() == 0 or self.offsets.dtype != torch.int64:
            raise ValueError(
                f"offsets must be a non-empty int64 vector, got {self.offsets.dtype} {tuple(self.offsets.shape)}"
            )
        if (
            int(self.offsets[0]) != 0
            or int(self.offsets[-1]) != len(self.values)
            or bool((self.offsets.diff() < 0).any())
        ):
            raise ValueError(f"offsets must rise from 0 to the number of values ({len(self.values)})")

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor | Sequence[float]], dtype: torch.dtype | None = None) -> Ragged:
        """Build from rows (tensors of one dtype and trailing shape, or lists of numbers).

        Without any value and without ``dtype`` the values are int64.
        """
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        if rows and isinstance(rows[0], Tensor):
            values = torch.cat([row for row in rows if isinstance(row, Tensor)])
            values = values if dtype is None else values.to(dtype)
        else:
            flat = [value for row in rows for value in row]
            values = torch.tensor(flat, dtype=dtype or (None if flat else torch.int64))
        return cls(values, offsets_of(lengths))

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor) -> Ragged:
        return cls(values, offsets_of(lengths))

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Ragged:
        """Build from the first ``lengths[i]`` entries of each row of ``padded [B, T, ...]``."""
        keep = torch.arange(padded.shape[1], device=padded.device) < lengths.to(padded.device)[:, None]
        return cls.from_lengths(padded[keep], lengths)

    @property
    def lengths(self) -> Tensor:
        """Return the lengths ``[B]``, int64 on the CPU."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> Tensor:
        """Return row ``index`` as a view, ``[length, ...]``."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def to_lists(self) -> list[list]:
        values, offsets = self.values.tolist(), self.offsets.tolist()
        return [values[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]

    def with_values(self, values: Tensor) -> Ragged:
        """Return the same rows with other values ``[N, ...]``."""
        return Ragged(values, self.offsets)

    def select(self, rows: Sequence[int] | Tensor) -> Ragged:
        """Return the given rows in the given order (repeats allowed)."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        # token j of output row i is token offsets[rows[i]] + j of the input
        index = torch.arange(int(offsets[-1])) + (self.offsets[:-1][rows] - offsets[:-1]).repeat_interleave(lengths)
        return Ragged(self.values[index.to(self.values.device)], offsets)

    def slice(self, start: int, stop: int) -> Ragged:
        """Return rows ``start`` to ``stop`` (exclusive), sharing the values' storage."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def to_padded(self, pad: float = 0, length: int | None = None) -> Tensor:
        """Return a right-padded tensor ``[B, T, ...]`` with ``T`` = the longest row, or ``length``. Raises ValueError:
        a row is longer than ``length``.
        """
        longest = int(self.lengths.max()) if len(self) else 0
        width = longest if length is None else length
        if width < longest:
            raise ValueError(f"a row has {longest} values, the padded length is {width}")
        padded = self.values.new_full((len(self), width, *self.values.shape[1:]), pad)
        padded[self.mask(width).to(self.values.device)] = self.values
        return padded

    def mask(self, length: int | None = None) -> Tensor:
        """Return a boolean mask ``[B, T]`` on the CPU: true where :meth:`to_padded` has a value."""
        lengths = self.lengths
        width = (int(lengths.max()) if len(self) else 0) if length is None else length
        return torch.arange(width) < lengths[:, None]

    def to(self, device: torch.device | str) -> Ragged:
        """Move the values to another device; offsets stay on the CPU."""
        return Ragged(self.values.to(device), self.offsets)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        return Ragged(
            torch.cat([part.values for part in parts]), offsets_of(torch.cat([part.lengths for part in parts]))
        )


def offsets_of(lengths: Tensor) -> Tensor:
    """Convert ``[B]`` lengths to ``[B + 1]`` offsets, int64 on the CPU."""
    return torch.nn.functional.pad(lengths.to("cpu", torch.int64).cumsum(0), (1, 0))
