"""Layouts that use the cache: prefill writes whole prompts or what was added to one, decoding reads and appends one token a
row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.generation.attention import PackedLayout, Scoring, attention_weights
from hone.generation.native.cache import KeyValueCache, columns
from hone.generation.native.prompts import Stacks, query_products, scored


class PrefillLayout:
    """Packed prompts whose keys and values also go into the cache.

    Args:
        cache: to write.
        rows: cache row of each prompt.
        lengths: tokens of each prompt.
    """

    def __init__(self, cache: KeyValueCache, rows: Tensor, lengths: Tensor) -> None:
        self._packed = PackedLayout.from_lengths(lengths, cache.device)
        self._cache = cache
        self._row = rows.repeat_interleave(lengths).to(cache.device)
        self.position_ids = self._packed.position_ids

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention within each prompt; ``[1, heads, N, head_dim]`` to ``[1, N, heads, head_dim]``."""
        keys, values = self._cache.layer(layer, key, value)
        place = self.position_ids[0]
        keys[self._row, :, place] = key[0].transpose(0, 1).to(keys.dtype)
        values[self._row, :, place] = value[0].transpose(0, 1).to(values.dtype)
        return self._packed.attend(layer, query, key, value, scoring)


class ExtendLayout:
    """New tokens behind what rows of the cache already hold: the next turn of an episode.

    Args:
        cache: to read and append to.
        rows: ``[R]`` cache rows.
        past: ``[R]`` tokens already in each.
        lengths: ``[R]`` new tokens of each, packed end to end in the pass.
    """

    def __init__(self, cache: KeyValueCache, rows: Tensor, past: Tensor, lengths: Tensor) -> None:
        self._cache, device = cache, cache.device
        self._rows, self._longest = rows.to(device), int((past + lengths).max())
        column = torch.arange(int(lengths.max()))
        starts = lengths.cumsum(0) - lengths
        inside = column < lengths[:, None]
        cell = (starts[:, None] + column).clamp(max=int(lengths.sum()) - 1)
        self._source = torch.where(inside, cell, 0).flatten().to(device)  # packed token in each cell of the rectangle
        self._cells = inside.flatten().nonzero()[:, 0].to(device)
        self._place = (past[:, None] + column).to(device)  # [R, Q]
        self._row_of = rows.repeat_interleave(lengths).to(device)
        self.position_ids = self._place.flatten()[self._cells][None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention of new tokens over their rows; ``[1, heads, N, head_dim]`` to ``[1, N, heads, head_dim]``."""
        keys, values = self._cache.layer(layer, key, value)
        place = self.position_ids[0]
        keys[self._row_of, :, place] = key[0].transpose(0, 1).to(keys.dtype)
        values[self._row_of, :, place] = value[0].transpose(0, 1).to(values.dtype)
        past_keys, past_values = (slab[self._rows, :, : self._longest] for slab in (keys, values))
        cells = query[0].transpose(0, 1)[self._source].unflatten(0, self._place.shape)  # [R, Q, heads, head_dim]
        queries = cells.transpose(1, 2).to(keys.dtype)
        hidden = torch.arange(self._longest, device=keys.device) > self._place[..., None]  # [R, Q, K]
        if scoring.window is not None:
            hidden |= torch.arange(self._longest, device=keys.device) <= self._place[..., None] - scoring.window
        groups = queries.shape[1] // past_keys.shape[1]
        if scoring.plain:
            mixed = F.scaled_dot_product_attention(
                queries,
                past_keys,
                past_values,
                attn_mask=~hidden[:, None],
                scale=scoring.scale,
                enable_gqa=groups > 1,
            )
        else:
            past_keys, past_values = (slab.repeat_interleave(groups, 1) for slab in (past_keys, past_values))
            weights = attention_weights(queries @ past_keys.transpose(-1, -2), hidden[:, None], scoring)
            mixed = weights.to(past_values.dtype) @ past_values
        return mixed.transpose(1, 2).flatten(0, 1)[self._cells][None]


class DecodeLayout:
    """One new token for each of the first ``A`` rows, which may continue prompts kept apart.

    Args:
        cache: to read and append to: what each row has of its own.
        lengths: ``[A]`` tokens already in each row; the new token goes to this place.
        shared: ``[A]`` tokens of a prompt kept apart before each row's own.
        stacks: which prompt that is; None when there are none.
    """

    def __init__(self, cache: KeyValueCache, lengths: Tensor, shared: Tensor, stacks: Stacks | None) -> None:
        self._cache, self._lengths = cache, lengths
        self._shared, self._stacks, self._before = shared, stacks, stacks.longest if stacks else 0
        shortest, longest = (int(length) for length in lengths.aminmax())
        self._longest, self._in_step = longest + 1, shortest == longest
        self._columns = columns(self._longest, cache.capacity)
        self._full = self._in_step and (self._before == 0 or int(shared.min()) == self._before)
        self._bias: dict[tuple[int | None, int], Tensor] = {}
        self._new: dict[int, Tensor] = {}
        self.position_ids = (shared + lengths)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention of each row's new token over prompt and row: ``[A, heads, 1, head_dim]`` to ``[A, 1, heads, head_dim]``.

        The heads that share keys are the rows of one matrix product: keys are read once and never repeated.
        """
        keys, values = self._cache.layer(layer, key, value)
        self._append(keys, key)
        self._append(values, value)
        rows, heads, _, width = query.shape
        kv_heads = keys.shape[1]
        past_keys = keys[:rows].flatten(0, 1)[:, : self._columns]
        past_values = values[:rows].flatten(0, 1)[:, : self._columns]
        lanes = query.reshape(rows * kv_heads, heads // kv_heads, width).to(keys.dtype)
        scale = scoring.scale if scoring.plain else 1.0
        products = query_products(lanes, past_keys, scale)
        if self._stacks and self._before:
            products = torch.cat([self._stacks.products(layer, lanes, key, value, scale), products], -1)
        weights = self._weights(scored(products, scale), scoring, rows)
        # apart before they are cast: products in half precision, and gathers, are slow over what has gaps
        of_prompt, of_own = weights.split_with_sizes((self._before, self._columns), -1)
        mixed = torch.bmm(of_own.to(past_values.dtype), past_values)
        if self._stacks and self._before:
            mixed += self._stacks.mix(layer, of_prompt.to(past_values.dtype).contiguous(), key, value)
        return mixed.view(rows, 1, heads, past_values.shape[-1])

    def _weights(self, scores: Tensor, scoring: Scoring, rows: int) -> Tensor:
        """Softmax of ``scores [A * kv_heads, heads of one, prompt + own]``, which are scaled where scoring is plain."""
        window = scoring.window
        if window is not None and window >= self._before + self._longest:
            window = None
        if not scoring.plain:
            hidden = self._hidden(window)[:, None, None]
            return attention_weights(scores.reshape(rows, -1, 1, scores.shape[-1]), hidden, scoring).view(scores.shape)
        if self._full and window is None:
            scores[..., self._before + self._longest :] = float("-inf")
        else:
            scores += self._hidden_bias(window, scores.shape[0] // rows)
        return scores.softmax(-1)

    def _append(self, slab: Tensor, states: Tensor) -> None:
        """Write ``states [A, kv_heads, 1, head_dim]`` behind each row's tokens."""
        rows, kv_heads, capacity = states.shape[0], slab.shape[1], slab.shape[2]
        if self._in_step:
            slab.select(2, self._longest - 1)[:rows].copy_(states.squeeze(2))
            return
        if kv_heads not in self._new:
            lanes = torch.arange(rows * kv_heads, device=slab.device) * capacity
            self._new[kv_heads] = lanes + self._lengths.repeat_interleave(kv_heads)
        flat = states.reshape(rows * kv_heads, -1)
        slab.view(-1, slab.shape[3]).index_copy_(0, self._new[kv_heads], flat.to(slab.dtype))

    def _hidden(self, window: int | None) -> Tensor:
        """``[A, prompt + own]``: places behind the end of prompt and row, or before the window of the new token."""
        device, shared, lengths = self._lengths.device, self._shared[:, None], self._lengths[:, None]
        before = torch.arange(self._before, device=device).expand(len(lengths), -1)
        own = torch.arange(self._columns, device=device)
        hidden = torch.cat([before >= shared, own > lengths], 1)
        if window is None:
            return hidden
        return hidden | (torch.cat([before, shared + own], 1) <= shared + lengths - window)

    def _hidden_bias(self, window: int | None, kv_heads: int) -> Tensor:
        """``[A * kv_heads, 1, prompt + own]`` float32: minus infinity at hidden places, else 0; made once a step."""
        if (window, kv_heads) not in self._bias:
            hidden = self._hidden(window)
            bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._bias[window, kv_heads] = bias.repeat_interleave(kv_heads, 0)[:, None]
        return self._bias[window, kv_heads]
