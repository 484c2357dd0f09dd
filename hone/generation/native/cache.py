"""The key-value cache: one slab a layer, rows of equal capacity, written in place.

A product over rows with gaps between what they hold reads them half as fast on the CPU. So rows get little more room than they
need, and products take all of it, the few empty places hidden, instead of a part of each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.generation.native.parked import Slabs


class KeyValueCache:
    """Keys and values ``[rows, kv_heads, capacity, head_dim]`` of every layer. Shapes are learned from the first write.

    Args:
        device: where it lives.
        dtype: of the entries.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.rows, self.capacity = 0, 0
        self._slabs: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def tokens(self) -> int:
        """Tokens there is room for."""
        return self.rows * self.capacity

    def reserve(self, rows: int, capacity: int, *, used: int, roomy: int, limit: int) -> None:
        """Make room for ``rows`` rows of ``capacity`` tokens, keeping the first ``used`` rows.

        A slab that is large enough stays; otherwise it grows in both directions as far as ``limit`` tokens allow, capacity
        to ``roomy`` so that this is rare.
        """
        if rows <= self.rows and capacity <= self.capacity:
            return
        shapes = ((max(rows, self.rows), max(roomy, self.capacity)), (rows, roomy), (rows, capacity))
        self.resize(*next((shape for shape in shapes if shape[0] * shape[1] <= limit), shapes[-1]), used=used)

    def resize(self, rows: int, capacity: int, *, used: int) -> None:
        """Make room for so much and no more, keeping the first ``used`` rows."""
        for layer, (keys, values) in self._slabs.items():
            self._slabs[layer] = (_moved(keys, (rows, capacity), used), _moved(values, (rows, capacity), used))
        self.rows, self.capacity = rows, capacity

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The slabs of a layer, made after the shapes of ``key`` and ``value`` ``[batch, kv_heads, length, head_dim]``."""
        if layer not in self._slabs:
            self._slabs[layer] = (self._empty(key), self._empty(value))
        return self._slabs[layer]

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` tokens of rows to other rows, source i to target i."""
        if not sources:
            return
        source, target = torch.tensor([sources, targets], device=self.device).unbind()
        for slabs in self._slabs.values():
            for slab in slabs:
                slab[target, :, :length] = slab[source, :, :length]

    def read_row(self, row: int, length: int) -> Slabs:
        """A copy of the first ``length`` tokens of a row."""
        return {
            layer: (keys[row, :, :length].clone(), values[row, :, :length].clone())
            for layer, (keys, values) in self._slabs.items()
        }

    def write_row(self, row: int, length: int, slabs: Slabs) -> None:
        """Begin a row with the first ``length`` tokens of what :meth:`read_row` gave."""
        for layer, parts in slabs.items():
            for slab, part in zip(self.layer(layer, *(part[None] for part in parts)), parts, strict=True):
                slab[row, :, :length] = part[:, :length]

    def clear(self) -> None:
        """Give the memory back."""
        self._slabs, self.rows, self.capacity = {}, 0, 0

    def _empty(self, states: Tensor) -> Tensor:
        shape = (self.rows, states.shape[1], self.capacity, states.shape[3])
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def with_spare(length: int) -> int:
    """The room that a row of ``length`` tokens gets."""
    step = _spare(length)
    return -(-length // step) * step


def columns(length: int, capacity: int) -> int:
    """How many places of each row a product takes when ``length`` of ``capacity`` are in use: all, if few are empty."""
    return capacity if capacity - length <= _spare(length) else length


def closing_moves(count: int, gone: set[int]) -> tuple[list[int], list[int]]:
    """How ``count`` rows close up when some are gone: gaps, and the last rows, which move into them."""
    left = count - len(gone)
    return sorted(row for row in gone if row < left), [row for row in range(left, count) if row not in gone]


def _moved(slab: Tensor, shape: tuple[int, int], used: int) -> Tensor:
    moved = slab.new_empty(shape[0], slab.shape[1], shape[1], slab.shape[3])
    kept = min(slab.shape[2], shape[1])
    used = min(used, slab.shape[0])
    moved[:used, :, :kept] = slab[:used, :, :kept]
    moved[:used, :, kept:].zero_()  # what is hidden is multiplied by 0, and must be a number
    moved[used:].zero_()
    return moved


def _spare(length: int) -> int:
    """Most empty places of a row of ``length`` tokens that products take along."""
    return max(16, length // 8)
