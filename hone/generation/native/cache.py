"""The KV cache of all layers: rows of equal capacity, one for each running sequence or shared prefix.

On the CPU a matmul over strided rows runs at half speed. So the capacity is kept close to the used length, and matmuls read
whole rows with unused positions masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from hone.models.attention.cache import Entries, KVLayerCache, LayerCache, NewTokens, RowCache
from hone.models.recurrent import STATES, StateCache

Kept = TypeVar("Kept", bound=RowCache)
RowEntries = dict[int, Entries]
"""Cache entries of one row, by layer."""
EXPERTS = -1
"""In place of a layer: what the routers chose for each token (:mod:`hone.models.experts`)."""


class ExpertLayerCache(KVLayerCache):
    """Experts of every token, ``[rows, 1, capacity, width]`` int16, in place of keys and values."""

    def resize(self, rows: int, capacity: int, *, used: int, device: torch.device, dtype: torch.dtype) -> None:
        super().resize(rows, capacity, used=used, device=device, dtype=torch.int16)

    def append(self, tokens: NewTokens, *states: Tensor) -> None:
        super().append(tokens, states[0], *states)


class KVCache:
    """Caches of all layers, with the same rows and capacity."""

    def __init__(
        self,
        device: torch.device,  # of the entries
        dtype: torch.dtype,  # of the entries
        new_layer: Callable[[int], LayerCache] = lambda layer: KVLayerCache(),  # creates the cache of a layer
    ) -> None:
        self.device, self.dtype = device, dtype
        self.rows, self.capacity = 0, 0
        self._new_layer = new_layer
        self._layers: dict[int, RowCache] = {}

    @property
    def tokens(self) -> int:
        return self.rows * self.capacity

    def layer(self, layer: int) -> LayerCache:
        """Return the cache of a layer, created at the first use."""
        return self._cache(layer, ExpertLayerCache if layer == EXPERTS else lambda: self._new_layer(layer))

    def states(self, layer: int) -> StateCache:
        """Return the cache of a layer that keeps states (:data:`hone.models.recurrent.STATES`), created at the first use."""
        return self._cache(layer, StateCache)

    def _cache(self, layer: int, make: Callable[[], Kept]) -> Kept:
        if layer not in self._layers:
            self._layers[layer] = make()
            self._resize(self._layers[layer], used=0)
        return cast("Kept", self._layers[layer])

    def kv_layer(self, layer: int) -> KVLayerCache:
        """Return the cache of a layer that stores keys and values."""
        cache = self.layer(layer)
        assert isinstance(cache, KVLayerCache)
        return cache

    def reserve(self, rows: int, capacity: int, *, used: int, generous: int, limit: int) -> None:
        """Ensure at least ``rows`` rows of ``capacity`` tokens, keeping the first ``used`` rows.

        A cache that is too small grows: to ``generous`` tokens per row, so that growth is rare, if ``limit`` tokens allow it.
        """
        if rows <= self.rows and capacity <= self.capacity:
            return
        shapes = ((max(rows, self.rows), max(generous, self.capacity)), (rows, generous), (rows, capacity))
        self.resize(*next((shape for shape in shapes if shape[0] * shape[1] <= limit), shapes[-1]), used=used)

    def resize(self, rows: int, capacity: int, *, used: int) -> None:
        """Set the size to exactly ``rows`` rows of ``capacity`` tokens, keeping the first ``used`` rows.

        If memory is missing for a layer, all layers get their old size back.
        """
        previous = self.rows, self.capacity
        self.rows, self.capacity = rows, capacity
        try:
            for cache in self._layers.values():
                self._resize(cache, used=used)
        except Exception:
            self.rows, self.capacity = previous
            for cache in self._layers.values():
                self._resize(cache, used=used)
            raise

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` tokens of rows to other rows: ``sources[i]`` to ``targets[i]``."""
        if not sources:
            return
        source, target = torch.tensor([sources, targets], device=self.device).unbind()
        for cache in self._layers.values():
            cache.copy_rows(source, target, length)

    def read_row(self, row: int, length: int) -> RowEntries:
        """Return a copy of the first ``length`` tokens of a row."""
        return {layer: cache.read_row(row, length) for layer, cache in self._layers.items()}

    def write_row(self, row: int, length: int, entries: RowEntries) -> None:
        """Write the first ``length`` tokens of the entries that :meth:`read_row` returned to the start of a row."""
        for layer, layer_entries in entries.items():
            cache = self.states(layer) if layer <= STATES else self.layer(layer)
            cache.write_row(row, length, layer_entries)

    def free(self) -> None:
        for cache in self._layers.values():
            cache.free()
        self._layers, self.rows, self.capacity = {}, 0, 0

    def _resize(self, cache: RowCache, *, used: int) -> None:
        cache.resize(self.rows, self.capacity, used=used, device=self.device, dtype=self.dtype)


def with_spare(length: int) -> int:
    """Return the capacity for rows of ``length`` tokens."""
    step = _spare(length)
    return -(-length // step) * step


def columns(length: int, capacity: int) -> int:
    """Return how many positions of each row a matmul reads: ``length``, or all of ``capacity`` if few are unused."""
    return capacity if capacity - length <= _spare(length) else length


def closing_moves(count: int, removed: set[int]) -> tuple[list[int], list[int]]:
    """Return the gaps that removed rows leave among ``count`` rows, and the last rows, which move into them."""
    left = count - len(removed)
    return sorted(row for row in removed if row < left), [row for row in range(left, count) if row not in removed]


def _spare(length: int) -> int:
    """Return how many unused positions of a row with ``length`` tokens a matmul may read."""
    return max(16, length // 8)
