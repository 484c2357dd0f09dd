"""Causal attention of new tokens over a paged KV cache.

Keys and values of all rows are in a pool of pages. A table names the pages of each row in order, so rows may share pages:

    pool, keys    page 0 | page 1 | page 2 | page 3 | page 4
    tables        row a: 3, 1    row b: 3, 4    (both begin with what is in page 3)

The keys and values of the new tokens are in the pool already. Rows with one new token each, as in a decode step, are computed by an
operator that reads the pages; no shape depends on their lengths. Rows with more, prompts whose beginning is cached, are computed like
whole prompts, from keys and values that are gathered first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hone.models.attention import varlen
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.models.attention.varlen import VarlenPlan
from hone.models.kernels import cuda
from hone.models.kernels.cuda.pages import WIDEST_HEAD, attend_pages

PAGE = 256
"""Tokens of a page, and of what one program of the operator computes: a row of 16k tokens and 8 key heads has 512 of them."""


@dataclass(frozen=True)
class RowPages:
    """Pages of rows that have one new token each."""

    tables: Tensor  # ``[R, W]`` int32, pages of each row in order; pages after its end are not read
    lengths: Tensor  # ``[R]`` int32, keys of each row, that of its new token included

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Compute the attention ``[R, heads, d]`` of the new tokens; a row's does not depend on other rows.

        ``query [R, heads, d]`` is in the dtype of the pool ``keys [pages, tokens of a page, kv_heads, d]``; query head ``i`` uses
        key head ``i // (heads / kv_heads)``.
        """
        options = {"window": scoring.window, "softcap": scoring.softcap, "sinks": scoring.sinks}
        return attend_pages(query, keys, values, self.tables, self.lengths, scale=scoring.scale, **options)


@dataclass(frozen=True)
class CachedPrompts:
    """Rows with consecutive new tokens after those that their pages hold already."""

    # ``[K]`` int64, place in the pool of every token of the rows, one row after another: page times its tokens, plus
    # place
    source: Tensor
    new: Tensor  # ``[R]`` new tokens of each row, on the CPU
    total: Tensor  # ``[R]`` all tokens of each row, on the CPU

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Compute the attention of the new tokens ``[N, heads, d]``, one row after another; see :meth:`RowPages.attend`.

        Where the variable-length call cannot, whole rows are computed, with zeros as the queries of earlier tokens.
        """
        key, value = (pages.flatten(0, 1).index_select(0, self.source) for pages in (keys, values))
        if query.device.type != "cpu" and varlen.obstacle(query, value, scoring) is None:
            return varlen.causal_attention(query, key, value, scoring, self._plan)
        whole = query.new_zeros(len(key), *query.shape[1:]).index_copy_(0, self._places, query)
        query, key, value = (states.transpose(0, 1)[None] for states in (whole, key, value))
        return self._rows.attend(0, query, key, value, scoring)[0].index_select(0, self._places)

    @cached_property
    def _plan(self) -> VarlenPlan:
        return VarlenPlan.from_lengths(self.new, self.total, self.source.device)

    @cached_property
    def _rows(self) -> PackedContext:
        return PackedContext.from_lengths(self.total, self.source.device)

    @cached_property
    def _places(self) -> Tensor:
        """Index of each new token among all tokens, ``[N]``."""
        skipped = (self.total - self.new).cumsum(0).repeat_interleave(self.new)
        return (torch.arange(len(skipped)) + skipped).to(self.source.device)


def obstacle(device: torch.device, head_dim: int) -> str | None:
    """Return why attention over pages cannot be computed on this device, or None if it can."""
    if not cuda.available(device):
        return "the device has no Triton, or is older than Ampere"
    if head_dim > WIDEST_HEAD:
        return f"heads are {head_dim} wide, more than {WIDEST_HEAD}"
    return None
