"""Prefill: computes prompts into rows of a cache, in forward passes of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hone.generation.native.cache import KVCache, RowEntries
from hone.generation.native.contexts import ExtendContext, PrefillContext
from hone.generation.native.sessions import SessionCache
from hone.generation.protocol import GenerationRequest
from hone.models.module_forward import Forward


class Prefill:
    """Computes prompts into a cache, reusing the session KV cache.

    Args:
        forward: forward pass of the model.
        sessions: session KV cache of earlier requests.
        stats: counters to update.
        device: of the model.
        max_tokens: maximum of prompt tokens per forward pass; a longer prompt gets its own pass.
    """

    def __init__(
        self,
        forward: Forward,
        sessions: SessionCache[RowEntries],
        stats: dict[str, int],
        *,
        device: torch.device,
        max_tokens: int,
    ) -> None:
        self._forward, self._sessions, self._stats = forward, sessions, stats
        self._device, self._max_tokens = device, max_tokens

    def fill(self, cache: KVCache, requests: Sequence[tuple[GenerationRequest, int]], version: int) -> None:
        """Compute the prompt of each request, without its last token, into a row of ``cache``.

        Args:
            cache: with capacity for them.
            requests: (request, row).
            version: of the weights.
        """
        new: list[tuple[int, list[int]]] = []
        continued: list[tuple[int, int, list[int]]] = []
        for request, row in requests:
            ids, kept = request.prompt_ids[:-1], self._resume(request, cache, row, version)
            if kept == 0 and ids:
                new.append((row, ids))
            elif kept < len(ids):
                continued.append((row, kept, ids[kept:]))
        self._whole_prompts(cache, new)
        self._extend(cache, continued)

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

    def _whole_prompts(self, cache: KVCache, prompts: list[tuple[int, list[int]]]) -> None:
        """Compute whole prompts: (row, tokens)."""
        while prompts:
            count, tokens = 1, len(prompts[0][1])
            while count < len(prompts) and tokens + len(prompts[count][1]) <= self._max_tokens:
                tokens += len(prompts[count][1])
                count += 1
            chunk, prompts = prompts[:count], prompts[count:]
            lengths = torch.tensor([len(ids) for _, ids in chunk])
            context = PrefillContext(cache, torch.tensor([row for row, _ in chunk]), lengths)
            ids = torch.tensor([[token for _, ids in chunk for token in ids]], device=self._device)
            self._forward.hidden(ids, context)
            self._stats["prefill_tokens"] += tokens

    def _extend(self, cache: KVCache, added: list[tuple[int, int, list[int]]]) -> None:
        """Compute new tokens of rows: (row, cached tokens, new tokens). Similar lengths share a padded tile."""
        added = sorted(added, key=lambda entry: len(entry[2]))
        while added:
            count = 1
            while count < len(added) and (count + 1) * (added[count][1] + len(added[count][2])) <= self._max_tokens:
                count += 1
            chunk, added = added[:count], added[count:]
            rows, past, new_ids = zip(*chunk, strict=True)
            lengths = torch.tensor([len(ids) for ids in new_ids])
            context = ExtendContext(cache, torch.tensor(rows), torch.tensor(past), lengths)
            ids = torch.tensor([[token for ids in new_ids for token in ids]], device=self._device)
            self._forward.hidden(ids, context)
            self._stats["prefill_tokens"] += int(lengths.sum())
