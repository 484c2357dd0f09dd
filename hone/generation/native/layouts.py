"""Layouts that use the cache: prefill writes whole prompts or what was added to a row, decoding reads and appends one token a
row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.generation.attention import PackedLayout, Scoring, attention_weights
from hone.generation.native.cache import KeyValueCache


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
    """One new token for each of the first ``A`` rows.

    Args:
        cache: to read and append to.
        lengths: ``[A]`` tokens already in each row; the new token goes to this place.
        longest: the largest of them, plus the new token.
    """

    def __init__(self, cache: KeyValueCache, lengths: Tensor, longest: int) -> None:
        self._cache, self._lengths, self._longest = cache, lengths, longest
        self._place = torch.arange(longest, device=lengths.device)
        self._bias: dict[tuple[int | None, int], Tensor] = {}
        self._new: dict[int, Tensor] = {}
        self.position_ids = lengths[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention of each row's new token over its row: ``[A, heads, 1, head_dim]`` to ``[A, 1, heads, head_dim]``.

        The heads that share keys are the rows of one matrix product: keys are read once and never repeated.
        """
        keys, values = self._cache.layer(layer, key, value)
        self._append(keys, key)
        self._append(values, value)
        rows, heads, _, width = query.shape
        kv_heads = keys.shape[1]
        past_keys = keys[:rows].flatten(0, 1)[:, : self._longest]
        past_values = values[:rows].flatten(0, 1)[:, : self._longest]
        grouped = query.reshape(rows * kv_heads, heads // kv_heads, width).to(keys.dtype)
        window = scoring.window if scoring.window is not None and scoring.window < self._longest else None
        if not scoring.plain:
            scores = torch.bmm(grouped, past_keys.transpose(1, 2)).view(rows, heads, 1, -1)
            weights = attention_weights(scores, self._hidden(window)[:, None, None], scoring)
            weights = weights.view(rows * kv_heads, heads // kv_heads, -1)
        else:
            if keys.dtype == torch.float32:
                scores = torch.bmm(grouped * scoring.scale, past_keys.transpose(1, 2))
            else:  # half-precision kernels are about twice as fast with the keys on the left
                scores = torch.bmm(past_keys, grouped.transpose(1, 2)).transpose(1, 2).float() * scoring.scale
            weights = scores.add_(self._hidden_bias(window, kv_heads)).softmax(-1)
        mixed = torch.bmm(weights.to(past_values.dtype), past_values)
        return mixed.view(rows, 1, heads, past_values.shape[-1])

    def _append(self, slab: Tensor, states: Tensor) -> None:
        """Write ``states [A, kv_heads, 1, head_dim]`` behind each row's tokens."""
        rows, kv_heads, capacity = len(self._lengths), slab.shape[1], slab.shape[2]
        if kv_heads not in self._new:
            lanes = torch.arange(rows * kv_heads, device=slab.device) * capacity
            self._new[kv_heads] = lanes + self._lengths.repeat_interleave(kv_heads)
        flat = states.reshape(rows * kv_heads, -1)
        slab.view(-1, slab.shape[3]).index_copy_(0, self._new[kv_heads], flat.to(slab.dtype))

    def _hidden(self, window: int | None) -> Tensor:
        """``[A, longest]``: places after the row's new token, or before its window."""
        hidden = self._place > self._lengths[:, None]
        return hidden if window is None else hidden | (self._place <= self._lengths[:, None] - window)

    def _hidden_bias(self, window: int | None, kv_heads: int) -> Tensor:
        """``[A * kv_heads, 1, longest]`` float32: minus infinity at hidden places, else 0; made once a step."""
        if (window, kv_heads) not in self._bias:
            hidden = self._hidden(window)
            bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._bias[window, kv_heads] = bias.repeat_interleave(kv_heads, 0)[:, None]
        return self._bias[window, kv_heads]
