"""Attention context of new tokens over the pages of their rows, for decoding and for prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hone.generation.native.paged.pool import SCRATCH, PagePool
from hone.generation.native.paged.transfer import to_device
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.models.attention.paged import CachedPrompts, RowPages


class PagedContext:
    """New tokens of rows, whose keys and values are written to the rows' pages."""

    def __init__(
        self,
        pool: PagePool,  # pages to write and to read
        position_ids: Tensor,  # ``[batch, length]``, position of each new token in its row
        slots: Tensor,  # ``[N]`` int64, place of each new token in the pool (:meth:`PagePool.write`)
        # what the new tokens see: pages, or each other alone if no row has earlier tokens
        seen: RowPages | CachedPrompts | PackedContext,
    ) -> None:
        self.position_ids = position_ids
        self._pool, self._slots, self._seen = pool, slots, seen

    @classmethod
    def of_step(cls, pool: PagePool, tables: Tensor, lengths: Tensor) -> PagedContext:
        """Return the context of one new token for each row; no shape depends on lengths, and the host reads no number.

        ``tables [B, W]`` int32 are the pages of the rows, ``lengths [B]`` int64 the tokens already in each.
        """
        size = pool.page_tokens
        place = (lengths // size).clamp(max=tables.shape[1] - 1)  # rows that only fill up a batch are never too long
        page = tables.gather(1, place[:, None]).squeeze(1)
        pages = RowPages(tables, (lengths + 1).to(torch.int32))
        return cls(pool, lengths[:, None], page * size + lengths % size, pages)

    @classmethod
    def of_chunks(
        cls, pool: PagePool, tables: Sequence[Sequence[int]], past: Sequence[int], lengths: Sequence[int]
    ) -> PagedContext:
        """Return the context of new tokens, at least 1 a row after its ``past``, packed in one row of the batch."""
        size, device = pool.page_tokens, pool.device
        before, new = torch.tensor(past), torch.tensor(lengths)
        widest = max(map(len, tables))
        table = torch.tensor([[*pages, *[SCRATCH] * (widest - len(pages))] for pages in tables])

        def places(counts: Tensor, first: Tensor) -> Tensor:
            """Return positions, and places in the pool, of consecutive tokens of each row: ``[2, tokens]``."""
            row = torch.arange(len(counts)).repeat_interleave(counts)
            position = first[row] + torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
            return torch.stack([position, table[row, position // size] * size + position % size])

        position, slots = to_device(places(new, before), torch.int64, device)
        seen: RowPages | CachedPrompts | PackedContext
        if not any(past):
            seen = PackedContext.from_lengths(new, device)
        elif max(lengths) == 1:
            seen = RowPages(*(to_device(part, torch.int32, device) for part in (table, before + 1)))
        else:
            _, source = places(before + new, torch.zeros_like(before))
            seen = CachedPrompts(to_device(source, torch.int64, device), new, before + new)
        return cls(pool, position[None], slots, seen)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Write keys and values, then compute attention: ``[batch, heads, length, d]`` to ``[batch, length, heads, d]``."""
        flat_key, flat_value = (states.transpose(1, 2).flatten(0, 1) for states in (key, value))  # [N, heads, d]
        self._pool.write(layer, self._slots, flat_key, flat_value)
        if isinstance(self._seen, PackedContext):
            return self._seen.attend(layer, query, key, value, scoring)
        rows = query.transpose(1, 2)
        flat = rows.flatten(0, 1).to(self._pool.dtype)
        return self._seen.attend(flat, *self._pool.layer(layer), scoring).view(rows.shape)

    def mix(self, layer: int, mixer: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """Refuse layers without softmax attention: only Llama-shaped models are decoded from pages."""
        raise TypeError(f"layer {layer} keeps a state that is not keys and values, which pages do not hold")
