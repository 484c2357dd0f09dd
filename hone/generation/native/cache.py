"""The key-value cache: one slab a layer, rows of equal capacity, written in place."""

from __future__ import annotations

import torch
from torch import Tensor


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

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for ``rows`` rows of ``capacity`` tokens, keeping what is there."""
        rows, capacity = max(rows, self.rows), max(capacity, self.capacity)
        if (rows, capacity) == (self.rows, self.capacity):
            return
        for layer, slabs in self._slabs.items():
            self._slabs[layer] = (self._grown(slabs[0], rows, capacity), self._grown(slabs[1], rows, capacity))
        self.rows, self.capacity = rows, capacity

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The slabs of a layer, made after the shapes of ``key`` and ``value`` ``[batch, kv_heads, length, head_dim]``."""
        if layer not in self._slabs:
            self._slabs[layer] = (self._empty(key), self._empty(value))
        return self._slabs[layer]

    def copy_row(self, source: int, targets: Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of a row to other rows."""
        for slabs in self._slabs.values():
            for slab in slabs:
                slab[targets, :, :length] = slab[source, :, :length]

    def clear(self) -> None:
        """Give the memory back."""
        self._slabs, self.rows, self.capacity = {}, 0, 0

    def _empty(self, states: Tensor) -> Tensor:
        shape = (self.rows, states.shape[1], self.capacity, states.shape[3])
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _grown(self, slab: Tensor, rows: int, capacity: int) -> Tensor:
        grown = slab.new_zeros(rows, slab.shape[1], capacity, slab.shape[3])
        grown[: slab.shape[0], :, : slab.shape[2]] = slab
        return grown
