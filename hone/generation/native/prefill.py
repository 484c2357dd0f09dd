"""Prefill: computes prompts into rows of a cache, in forward passes of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hone.data.image_processor import ImageProcessor
from hone.generation.native.cache import KVCache, RowEntries
from hone.generation.native.contexts import ExtendContext, PrefillContext, prompt_images
from hone.generation.native.sessions import SessionCache
from hone.generation.protocol import GenerationRequest
from hone.models.module_forward import Forward


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
