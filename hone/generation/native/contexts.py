"""Attention contexts with a KV cache: prefill of whole prompts, extension of rows, and decoding of one token per row; and how prompts are
computed into rows of a cache, in forward passes of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.data.image_processor import ImageProcessor
from hone.data.images import ImageData
from hone.data.ragged import Ragged
from hone.generation.native.cache import EXPERTS, KVCache, RowEntries, columns
from hone.generation.native.prefixes import PrefixGroups, query_scores, scaled
from hone.generation.native.sessions import SessionCache
from hone.generation.protocol import GenerationRequest
from hone.models.attention.cache import KVLayerCache, LayerCache
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.models.attention.softmax import attention_probabilities, without_cudnn
from hone.models.images import images_by_key, rope_positions, seen_ahead, tokens_ahead
from hone.models.module_forward import Forward
from hone.models.recurrent import STATES


@dataclass(frozen=True)
class PromptImages:
    """Images of the prompts of one forward pass."""

    by_key: Mapping[int, ImageData]
    positions: Tensor | None  # ``[3, 1, N]`` rotary positions of the new tokens; None where a token has one position


def prompt_images(
    processor: ImageProcessor, requests: Sequence[GenerationRequest], past: Sequence[int]
) -> PromptImages | None:
    """Return the images of prompts, of which the first ``past`` tokens are cached and the last comes later; None without images."""
    by_key = images_by_key(request.images for request in requests)
    if not by_key:
        return None
    if not processor.in_grid:
        return PromptImages(by_key, None)
    prompts = Ragged.from_rows([request.prompt_ids for request in requests], torch.int64)
    positions, _ = rope_positions(prompts, processor, by_key)
    parts = [
        positions[:, start + kept : end - 1]
        for start, end, kept in zip(prompts.offsets[:-1].tolist(), prompts.offsets[1:].tolist(), past, strict=True)
    ]
    return PromptImages(by_key, torch.cat(parts, 1)[:, None])


def rope_offsets(processor: ImageProcessor | None, requests: Sequence[GenerationRequest]) -> list[int]:
    """Return for each request how far the rotary positions of its response are from the numbers of its tokens."""
    by_key: dict[int, Any] = images_by_key(request.images for request in requests)
    if processor is None or not processor.in_grid or not by_key:
        return [0] * len(requests)
    prompts = Ragged.from_rows([request.prompt_ids for request in requests], torch.int64)
    return rope_positions(prompts, processor, by_key)[1].tolist()


class _CachedContext:
    """Base of the contexts with a cache; implements :class:`hone.models.attention.cache.NewTokens` for its pass."""

    images: PromptImages | None = None  # of the new tokens
    _cache: KVCache
    _row_of: Tensor  # row of each token, where the tokens of all rows are packed in one
    position_ids: Tensor
    rows: Any
    past: Any
    lengths: Any

    def write(self, kv: Tensor, states: Tensor) -> None:
        """Write ``states [1, kv_heads, N, d]`` of the new tokens after the cached tokens of their rows."""
        kv[self._row_of, :, self.position_ids[0]] = states[0].transpose(0, 1).to(kv.dtype)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Append keys and values, then compute attention: ``[batch, heads, length, d]`` to ``[batch, length, heads, d]``."""
        cache = self._cache.layer(layer)
        cache.append(self, query, key, value)
        return cache.attend(self, layer, query, key, value, scoring=scoring)

    def keep_experts(self, choices: Tensor) -> None:
        """Append the experts of the new tokens, ``[batch, length, width]``, to the cache."""
        self._cache.layer(EXPERTS).append(self, choices[:, None])

    def mix(self, layer: int, mixer: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """Append ``states [batch, length, ...]`` to the layer's cache and mix them there; ``mixer`` is for whole sequences."""
        flat, shape = [state.flatten(0, 1) for state in states], states[0].shape[:2]
        if layer <= STATES:
            return self._cache.states(layer).mix(self, mixer, *flat).unflatten(0, shape)
        return self._mix(self._cache.layer(layer), layer, flat).unflatten(0, shape)

    def _mix(self, cache: LayerCache, layer: int, states: list[Tensor]) -> Tensor:
        cache.append(self, *states)
        return cache.attend(self, layer, *states, scoring=None)


class PrefillContext(_CachedContext):
    """Packed prompts whose keys and values are also written to the cache.

    Args:
        cache: to write.
        rows: ``[R]`` cache row of each prompt.
        lengths: ``[R]`` tokens of each prompt.
    """

    def __init__(self, cache: KVCache, rows: Tensor, lengths: Tensor) -> None:
        self._packed = PackedContext.from_lengths(lengths, cache.device)
        self._cache = cache
        self._row_of = rows.repeat_interleave(lengths).to(cache.device)
        self.rows, self.past, self.lengths = rows, torch.zeros_like(rows), lengths
        self.position_ids = self._packed.position_ids

    def see_ahead(self, ids: Tensor, processor: ImageProcessor) -> None:
        """Let the tokens of each image among the new ones ``[N]`` see each other, if they do in the model."""
        rows, index = Ragged.from_lengths(ids, self.lengths), Ragged.from_lengths(torch.arange(len(ids)), self.lengths)
        ahead = seen_ahead(rows, index, processor, self._cache.device)
        self._packed = replace(self._packed, ahead=ahead)

    def mix(self, layer: int, mixer: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """Append ``states [1, N, ...]`` and mix each prompt separately."""
        if layer <= STATES:
            return super().mix(layer, mixer, *states)
        self._cache.layer(layer).append(self, *(state.flatten(0, 1) for state in states))
        return self._packed.mix(layer, mixer, *states)

    def softmax_attention(
        self, cache: KVLayerCache, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Compute attention within each prompt: ``[1, heads, N, head_dim]`` to ``[1, N, heads, head_dim]``."""
        del cache
        return self._packed.attend(layer, query, key, value, scoring)


@dataclass(frozen=True)
class _OneTokenEach:
    """One new token for each of some rows, for caches that keep a single state per row."""

    rows: Tensor
    past: Tensor
    lengths: Tensor


class ExtendContext(_CachedContext):
    """New tokens after the cached tokens of rows: the next turn of an episode.

    Args:
        cache: to read and append to.
        rows: ``[R]`` cache rows.
        past: ``[R]`` tokens already in each.
        lengths: ``[R]`` new tokens of each, packed in one row.
    """

    def __init__(self, cache: KVCache, rows: Tensor, past: Tensor, lengths: Tensor) -> None:
        self._cache, device = cache, cache.device
        self.rows, self.past, self.lengths = rows, past, lengths
        self._rows, self._longest = rows.to(device), int((past + lengths).max())
        column = torch.arange(int(lengths.max()))
        self._starts = lengths.cumsum(0) - lengths
        inside = column < lengths[:, None]
        token = (self._starts[:, None] + column).clamp(max=int(lengths.sum()) - 1)
        self._source = (
            torch.where(inside, token, 0).flatten().to(device)
        )  # packed token in each slot of the padded tile
        self._slots = inside.flatten().nonzero()[:, 0].to(device)
        self._place = (past[:, None] + column).to(device)  # [R, Q]
        self._row_of = rows.repeat_interleave(lengths).to(device)
        self.position_ids = self._place.flatten()[self._slots][None]
        self._last, self._last_in_windows = self._place, self._place  # the last token that each sees

    def see_ahead(self, ids: Tensor, processor: ImageProcessor) -> None:
        """Let the tokens of each image among the new ones ``[N]`` see each other, if they do in the model."""
        if processor.sees_ahead:
            ahead = tokens_ahead(ids).to(self._source.device)[self._source].view_as(self._place)
            self._last_in_windows = self._place + ahead
            self._last = self._place if processor.only_in_windows else self._last_in_windows

    def _mix(self, cache: LayerCache, layer: int, states: list[Tensor]) -> Tensor:
        if cache.per_token:
            return super()._mix(cache, layer, states)
        outputs: list[Tensor] = []
        order: list[Tensor] = []
        for column in range(int(self.lengths.max())):
            member = (self.lengths > column).nonzero()[:, 0]
            tokens = _OneTokenEach(self.rows[member], self.past[member] + column, torch.ones_like(member))
            order.append((self._starts[member] + column).to(states[0].device))
            tokens_states = [state[order[-1]] for state in states]
            cache.append(tokens, *tokens_states)
            outputs.append(cache.attend(tokens, layer, *tokens_states, scoring=None))
        return torch.cat(outputs)[torch.cat(order).argsort()]

    def softmax_attention(
        self, cache: KVLayerCache, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Compute attention of new tokens over their rows: ``[1, heads, N, head_dim]`` to ``[1, N, heads, head_dim]``."""
        del layer, key, value
        keys, values = (kv[self._rows, :, : self._longest] for kv in (cache.keys, cache.values))
        slots = query[0].transpose(0, 1)[self._source].unflatten(0, self._place.shape)  # [R, Q, heads, head_dim]
        queries = slots.transpose(1, 2).to(keys.dtype)
        last = self._last if scoring.window is None else self._last_in_windows
        hidden = torch.arange(self._longest, device=keys.device) > last[..., None]  # [R, Q, K]
        if scoring.window is not None:
            hidden |= torch.arange(self._longest, device=keys.device) <= self._place[..., None] - scoring.window
        groups = queries.shape[1] // keys.shape[1]
        if scoring.plain:
            with without_cudnn(queries.device):
                mixed = F.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=~hidden[:, None], scale=scoring.scale, enable_gqa=groups > 1
                )
        else:
            keys, values = (kv.repeat_interleave(groups, 1) for kv in (keys, values))
            probabilities = attention_probabilities(queries @ keys.transpose(-1, -2), hidden[:, None], scoring)
            mixed = probabilities.to(values.dtype) @ values
        return mixed.transpose(1, 2).flatten(0, 1)[self._slots][None]


class RowExtent(NamedTuple):
    """The extent of the first ``A`` rows, known to the host: reading it from the device would wait for the device."""

    shortest: int  # cached tokens of the shortest row
    longest: int  # cached tokens of the longest row
    least_shared: int  # tokens of the shortest shared prefix


class DecodeContext(_CachedContext):
    """One new token for each of the first ``A`` rows, which may continue shared prefixes."""

    _tokens = 1
    """Query tokens of each row, ``Q``."""

    def __init__(
        self,
        cache: KVCache,  # to read and append to: each row's tokens, without a shared prefix
        lengths: Tensor,  # ``[A]`` tokens already in each row, which is the position of the new token in the row
        shared: Tensor,  # ``[A]`` tokens of the shared prefix before each row's tokens
        extent: RowExtent,  # of both
        groups: PrefixGroups | None,  # the shared prefix of each row; None without shared prefixes
        # ``[A]`` added to the number of the new token in its sequence for its rotary position
        rope_offset: Tensor | int = 0,
    ) -> None:
        self._cache, self.past = cache, lengths
        self._shared, self._groups, self._before = shared, groups, groups.longest if groups else 0
        self._longest, self._in_step = extent.longest + 1, extent.shortest == extent.longest
        self._columns = columns(self._longest, cache.capacity)
        self._full = self._in_step and (self._before == 0 or extent.least_shared == self._before)
        self._bias: dict[tuple[int | None, int], Tensor] = {}
        self._new: dict[int, Tensor] = {}
        self.position_ids = (shared + lengths + rope_offset)[:, None]

    @cached_property
    def rows(self) -> Tensor:  # type: ignore[override]
        """``[A]``: the first ``A`` rows."""
        return torch.arange(len(self.past), device=self.past.device)

    @cached_property
    def lengths(self) -> Tensor:  # type: ignore[override]
        """``[A]``: one new token a row."""
        return torch.ones_like(self.past)

    def softmax_attention(
        self, cache: KVLayerCache, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Compute attention of each row's new token over prefix and row: ``[A, heads, 1, d]`` to ``[A, 1, heads, d]``.

        Query heads that share a key head are the rows of one matmul, so keys are read once.
        """
        del key, value
        rows, heads, _, width = query.shape
        kv_heads = cache.keys.shape[1]
        mixed = self._mixed(cache, layer, query.reshape(rows * kv_heads, heads // kv_heads, width), scoring)
        return mixed.view(rows, 1, heads, mixed.shape[-1])

    def _mixed(self, cache: KVLayerCache, layer: int, queries: Tensor, scoring: Scoring) -> Tensor:
        """Compute attention of ``queries [A * kv_heads, n, d]`` over prefixes and rows, ``[A * kv_heads, n, d_v]``.

        The ``n`` queries of a key head are those of each query head, and within it of each new token of the row.
        """
        rows, kv_heads = len(self.past), cache.keys.shape[1]
        past_keys = cache.keys[:rows].flatten(0, 1)[:, : self._columns]
        past_values = cache.values[:rows].flatten(0, 1)[:, : self._columns]
        queries = queries.to(past_keys.dtype)
        scale = scoring.scale if scoring.plain else 1.0
        scores = query_scores(queries, past_keys, scale)
        if self._groups and self._before:
            scores = torch.cat([self._groups.scores(layer, queries, kv_heads, scale), scores], -1)
        probabilities = self._probabilities(scaled(scores, scale), scoring, rows)
        # Split before the cast: half-precision matmuls and gathers are slow over strided memory.
        prefix_probabilities, row_probabilities = probabilities.split_with_sizes((self._before, self._columns), -1)
        mixed = torch.bmm(row_probabilities.to(past_values.dtype), past_values)
        if self._groups and self._before:
            mixed += self._groups.mix(layer, prefix_probabilities.to(past_values.dtype).contiguous(), kv_heads)
        return mixed

    def write(self, kv: Tensor, states: Tensor) -> None:
        """Write ``states [A, kv_heads, 1, d]`` after each row's tokens."""
        rows, kv_heads, capacity = states.shape[0], kv.shape[1], kv.shape[2]
        if self._in_step:
            kv.select(2, self._longest - 1)[:rows].copy_(states.squeeze(2))
            return
        if kv_heads not in self._new:
            first = torch.arange(rows * kv_heads, device=kv.device) * capacity
            self._new[kv_heads] = first + self.past.repeat_interleave(kv_heads)
        flat = states.reshape(rows * kv_heads, -1)
        kv.view(-1, kv.shape[3]).index_copy_(0, self._new[kv_heads], flat.to(kv.dtype))

    def _probabilities(self, scores: Tensor, scoring: Scoring, rows: int) -> Tensor:
        """Return the softmax of ``scores [A * kv_heads, n, prefix + row]``, already scaled if scoring is plain."""
        window = scoring.window
        if window is not None and window >= self._before + self._longest:
            window = None
        if not scoring.plain:
            hidden = self._hidden(window)[:, None]
            joint = scores.reshape(rows, -1, self._tokens, scores.shape[-1])
            return attention_probabilities(joint, hidden, scoring).view(scores.shape)
        if self._full and window is None:
            scores[..., self._before + self._longest :] = float("-inf")
        else:
            scores.unflatten(1, (-1, self._tokens)).add_(self._hidden_bias(window, scores.shape[0] // rows))
        return scores.softmax(-1)

    def _hidden(self, window: int | None) -> Tensor:
        """Return a mask ``[A, Q, prefix + row]``: True after the end of the prefix, after the new token, and before its window."""
        device, shared = self.past.device, self._shared[:, None, None]
        place = (self.past[:, None] + torch.arange(self._tokens, device=device))[..., None]
        before = torch.arange(self._before, device=device).expand(*place.shape[:2], -1)
        in_row = torch.arange(self._columns, device=device)
        hidden = torch.cat([before >= shared, in_row > place], -1)
        if window is None:
            return hidden
        position = torch.cat([before, (shared + in_row).expand(*place.shape[:2], -1)], -1)
        return hidden | (position <= shared + place - window)

    def _hidden_bias(self, window: int | None, kv_heads: int) -> Tensor:
        """Return ``[A * kv_heads, 1, Q, prefix + row]`` float32: minus infinity where hidden, else 0; computed once a step."""
        if (window, kv_heads) not in self._bias:
            hidden = self._hidden(window)
            bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._bias[window, kv_heads] = bias.repeat_interleave(kv_heads, 0)[:, None]
        return self._bias[window, kv_heads]


class Part(NamedTuple):
    """Tokens to compute."""

    row: int  # of the cache
    past: int  # tokens cached in it
    ids: list[int]  # new tokens
    request: GenerationRequest | None = None  # they belong to its prompt; None for text of no request


class Prefill:
    """Computes prompts into a cache, reusing the session KV cache."""

    def __init__(
        self,
        forward: Forward,  # forward pass of the model
        sessions: SessionCache[RowEntries],  # session KV cache of earlier requests
        stats: dict[str, int],  # counters to update
        *,
        device: torch.device,
        max_tokens: int,  # maximum of prompt tokens per forward pass; a longer prompt gets its own pass
        processor: ImageProcessor | None = None,  # of the model's images; None for a model of text
    ) -> None:
        self._forward, self._sessions, self._stats = forward, sessions, stats
        self._device, self._max_tokens, self._processor = device, max_tokens, processor

    def fill(self, cache: KVCache, requests: Sequence[tuple[GenerationRequest, int]], version: int) -> None:
        """Compute the prompt of each (request, row), without its last token, into the row of a cache with capacity for it."""
        parts: list[Part] = []
        for request, row in requests:
            ids, kept = request.prompt_ids[:-1], self._resume(request, cache, row, version)
            parts.append(Part(row, kept, ids[kept:], request))
        self.extend(cache, parts)

    def extend(self, cache: KVCache, parts: Sequence[Part]) -> None:
        self._whole_prompts(cache, [part for part in parts if part.past == 0 and part.ids])
        self._extend(cache, [part for part in parts if part.past > 0 and part.ids])

    def _resume(self, request: GenerationRequest, cache: KVCache, row: int, version: int) -> int:
        """Copy the cached turn of the request's session into a row and return its number of tokens."""
        cached = self._sessions.find(request.session, request.prompt_ids, version)
        if cached is None:
            return 0
        turn, shared = cached
        cache.write_row(row, shared, turn.entries)
        self._stats["session_hits"] += 1
        self._stats["session_tokens"] += shared
        self._stats["cached_tokens"] += shared
        return shared

    def _whole_prompts(self, cache: KVCache, prompts: list[Part]) -> None:
        while prompts:
            count, tokens = 1, len(prompts[0].ids)
            while count < len(prompts) and tokens + len(prompts[count].ids) <= self._max_tokens:
                tokens += len(prompts[count].ids)
                count += 1
            chunk, prompts = prompts[:count], prompts[count:]
            lengths = torch.tensor([len(part.ids) for part in chunk])
            self._run(PrefillContext(cache, torch.tensor([part.row for part in chunk]), lengths), chunk)

    def _extend(self, cache: KVCache, added: list[Part]) -> None:
        """Compute new tokens of rows. Similar lengths share a padded tile."""
        added = sorted(added, key=lambda part: len(part.ids))
        while added:
            count = 1
            while count < len(added) and (count + 1) * (added[count].past + len(added[count].ids)) <= self._max_tokens:
                count += 1
            chunk, added = added[:count], added[count:]
            rows, past, lengths = (
                torch.tensor(values)
                for values in zip(*((part.row, part.past, len(part.ids)) for part in chunk), strict=True)
            )
            self._run(ExtendContext(cache, rows, past, lengths), chunk)

    def _run(self, context: PrefillContext | ExtendContext, chunk: Sequence[Part]) -> None:
        if self._processor is not None:
            prompts = [(part.request, part.past) for part in chunk if part.request is not None]
            context.images = prompt_images(self._processor, *zip(*prompts, strict=True))
        ids = torch.tensor([token for part in chunk for token in part.ids])
        if self._processor is not None:
            context.see_ahead(ids, self._processor)
        ids = ids[None].to(self._device)
        self._forward.hidden(ids, context)
        self._stats["prefill_tokens"] += ids.shape[1]
