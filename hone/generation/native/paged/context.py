"""Attention context of new tokens over the pages of their rows, for decoding and for prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.generation.native.paged.pages import SCRATCH
from hone.generation.native.paged.pool import PagePool
from hone.generation.native.paged.transfer import to_device
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.models.attention.paged import PagedKeys, paged_attention


class PagedContext:
    """New tokens of rows, whose keys and values are written to the rows' pages.

    Args:
        pool: pages to write and to read.
        position_ids: ``[batch, length]``, position of each new token in its row.
        slots: ``[N]`` int64, place of each new token in the pool (:meth:`PagePool.write`).
        pages: of the rows, for attention.
        packed: whole sequences, if no row has earlier tokens: attention then reads no pages.
    """

    def __init__(
        self,
        pool: PagePool,
        position_ids: Tensor,
        slots: Tensor,
        pages: PagedKeys,
        packed: PackedContext | None = None,
    ) -> None:
        self.position_ids = position_ids
        self._pool, self._slots, self._pages, self._packed = pool, slots, pages, packed

    @classmethod
    def of_step(cls, pool: PagePool, tables: Tensor, lengths: Tensor, ends: Tensor) -> PagedContext:
        """Return the context of one new token for each row; no shape depends on lengths, and the host reads no number.

        Args:
            pool: pages.
            tables: ``[B, W]`` int32, pages of the rows.
            lengths: ``[B]`` int64, tokens already in each row.
            ends: ``[B + 1]`` int32, ``0 .. B``.
        """
        size = pool.page_tokens
        page = tables.gather(1, (lengths // size)[:, None]).squeeze(1)
        pages = PagedKeys(tables, (lengths + 1).to(torch.int32), ends, longest_query=1)
        return cls(pool, lengths[:, None], page * size + lengths % size, pages)

    @classmethod
    def of_chunks(
        cls, pool: PagePool, tables: Sequence[Sequence[int]], past: Sequence[int], lengths: Sequence[int]
    ) -> PagedContext:
        """Return the context of consecutive new tokens of rows, packed in one row of the batch.

        Args:
            pool: pages.
            tables: pages of each row.
            past: tokens already in each row.
            lengths: new tokens of each row, at least 1.
        """
        size, device = pool.page_tokens, pool.device
        before, new = torch.tensor(past), torch.tensor(lengths)
        widest = max(map(len, tables))
        table = torch.tensor([[*pages, *[SCRATCH] * (widest - len(pages))] for pages in tables])
        row = torch.arange(len(lengths)).repeat_interleave(new)
        position = before[row] + torch.arange(len(row)) - (new.cumsum(0) - new)[row]
        slots = table[row, position // size] * size + position % size
        keys = PagedKeys(
            to_device(table, torch.int32, device),
            to_device(before + new, torch.int32, device),
            to_device(F.pad(new.cumsum(0), (1, 0)), torch.int32, device),
            int(new.max()),
        )
        packed = None if any(past) else PackedContext.from_lengths(new, device)
        places = to_device(torch.stack([position, slots]), torch.int64, device)
        return cls(pool, places[:1], places[1], keys, packed)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Write keys and values, then compute attention: ``[batch, heads, length, d]`` to ``[batch, length, heads, d]``."""
        flat_key, flat_value = (states.transpose(1, 2).flatten(0, 1) for states in (key, value))  # [N, heads, d]
        self._pool.write(layer, self._slots, flat_key, flat_value)
        if self._packed is not None:
            return self._packed.attend(layer, query, key, value, scoring)
        rows = query.transpose(1, 2)
        flat = rows.flatten(0, 1).to(self._pool.dtype)
        output = paged_attention(flat, *self._pool.layer(layer), scoring, self._pages)
        return output.view(rows.shape)

    def mix(self, layer: int, mixer: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """Refuse layers without softmax attention: only Llama-shaped models are decoded from pages.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"layer {layer} keeps a state that is not keys and values, which pages do not hold")
