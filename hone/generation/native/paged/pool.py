"""The keys and values of all pages of all layers, in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.generation.native.paged.transfer import to_device
from hone.models.attention.paged import PAGE


@dataclass(frozen=True)
class PageShape:
    """Sizes of a page."""

    layers: int  # of the model
    kv_heads: int  # of a layer
    head_dim: int  # width of keys, and of values
    dtype: torch.dtype  # of both
    tokens: int = PAGE  # of a page

    @property
    def bytes(self) -> int:
        return 2 * self.layers * self.tokens * self.kv_heads * self.head_dim * self.dtype.itemsize


class PagePool:
    """Keys and values ``[layers, 2, pages, tokens, kv_heads, head_dim]``; all zero at first: rows that fill up a batch read numbers."""

    def __init__(self, shape: PageShape, count: int, device: torch.device) -> None:
        self.page_tokens = shape.tokens
        size = (shape.layers, 2, count, shape.tokens, shape.kv_heads, shape.head_dim)
        self._kv = torch.zeros(size, dtype=shape.dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self._kv.device

    @property
    def dtype(self) -> torch.dtype:
        return self._kv.dtype

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each ``[pages, tokens, kv_heads, head_dim]``."""
        return self._kv[layer, 0], self._kv[layer, 1]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values ``[N, kv_heads, head_dim]`` into ``slots [N]``: page times tokens of a page, plus place in it."""
        for pages, states in zip(self.layer(layer), (keys, values), strict=True):
            pages.flatten(0, 1).index_copy_(0, slots, states.to(pages.dtype))

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages of all layers: ``sources[i]`` to ``targets[i]``."""
        if not sources:
            return
        source, target = to_device([sources, targets], torch.int64, self.device).unbind()
        self._kv.index_copy_(2, target, self._kv.index_select(2, source))
