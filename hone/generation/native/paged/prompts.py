"""Prompts of entering rows: from pages of another row, of an earlier turn, or by a forward pass.

Full pages are shared. The page in which a sequence ends is copied, because each row writes its next tokens there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hone.generation.native.paged.context import PagedContext
from hone.generation.native.paged.pool import PagePool, Pages, pages_for
from hone.generation.native.paged.transfer import to_device
from hone.generation.native.scheduler import Job
from hone.generation.native.sessions import CachedTurn, SessionCache
from hone.models.module_forward import Forward

PromptKey = tuple[bytes, int]
"""A prompt, and the version of the weights that compute it."""


class _Wave(NamedTuple):
    """Rows that can be computed together: pages to copy first, then tokens to compute."""

    copies: list[tuple[int, int]]  # (page, its copy)
    missing: list[tuple[Job, int]]  # (job, number of its tokens that are in its pages)


class Prompts:
    """Fills the pages of entering rows.

    Kept turns of sessions have their pages as a user. Prompts of more than ``max_tokens`` are computed in chunks.
    """

    def __init__(
        self, forward: Forward, sessions: SessionCache[list[int]], stats: dict[str, int], *, max_tokens: int
    ) -> None:
        self._forward, self._sessions, self._stats, self._max_tokens = forward, sessions, stats, max_tokens

    def fill(self, pool: PagePool, pages: Pages, running: Sequence[Job], jobs: Sequence[Job], version: int) -> None:
        """Give each job pages with all of its tokens but the last, and space for the last.

        ``running`` are the jobs whose prompts can be shared, ``jobs`` those that enter, without pages.

        Raises:
            OutOfPages: there are too few pages. Jobs may have pages already.
        """
        owners = {(job.prompt, job.version): job for job in running}
        filled = set(map(id, running))
        first, second = _Wave([], []), _Wave([], [])
        for job in jobs:
            twin = owners.setdefault((job.prompt, version), job)
            if twin is job or len(job.request.prompt_ids) == 1:
                wave, kept = first, self._resume(job, pool, pages, first, version)
            else:
                wave = first if id(twin) in filled else second  # a twin that enters too has no content yet
                kept = self._share_prompt(job, twin, pool, pages, wave)
            job.pages += self.take(pages, pages_for(len(job.ids), pool.page_tokens) - len(job.pages))
            if kept < len(job.ids) - 1:
                wave.missing.append((job, kept))
        for wave in (first, second):
            pool.copy_pages([source for source, _ in wave.copies], [target for _, target in wave.copies])
            self._compute(pool, wave.missing)

    def _share_prompt(self, job: Job, twin: Job, pool: PagePool, pages: Pages, wave: _Wave) -> int:
        """Let a job begin with the prompt of another; return the number of its tokens."""
        tokens = len(job.request.prompt_ids) - 1
        self._fork(job, twin.pages, tokens, pool, pages, wave)
        self._stats["prefix_hits"] += 1
        self._stats["cached_tokens"] += tokens
        return tokens

    def _resume(self, job: Job, pool: PagePool, pages: Pages, wave: _Wave, version: int) -> int:
        """Let a job begin with the kept turn of its session; return the number of common tokens."""
        cached: tuple[CachedTurn[list[int]], int] | None = self._sessions.find(job.request.session, job.ids, version)
        if cached is None:
            return 0
        turn, tokens = cached
        self._fork(job, turn.entries, tokens, pool, pages, wave)
        self._stats["session_hits"] += 1
        self._stats["session_tokens"] += tokens
        self._stats["cached_tokens"] += tokens
        return tokens

    def _fork(self, job: Job, source: Sequence[int], tokens: int, pool: PagePool, pages: Pages, wave: _Wave) -> None:
        """Let a job begin with the first tokens of other pages."""
        full, rest = divmod(tokens, pool.page_tokens)
        job.pages += source[:full]
        pages.share(source[:full])
        if rest:
            job.pages += self.take(pages, 1)
            wave.copies.append((source[full], job.pages[-1]))

    def take(self, pages: Pages, count: int) -> list[int]:
        """Return free pages; kept turns are dropped if there are too few.

        A dropped page may be one that is still to be copied: all copies of a wave read before one of them writes.

        Raises:
            OutOfPages: there are too few even so.
        """
        while pages.free < count and len(self._sessions):
            self._sessions.forget_oldest()
        return pages.take(count)

    def droppable(self, pages: Pages) -> int:
        """Return the number of pages that only kept turns use."""
        users = Counter(page for turn in self._sessions for page in turn.entries)
        return sum(pages.users(page) == count for page, count in users.items())

    def _compute(self, pool: PagePool, missing: Sequence[tuple[Job, int]]) -> None:
        """Compute the missing tokens of rows in forward passes of bounded size; a long prompt is cut into chunks."""
        rows = [(job, past, job.ids[:-1]) for job, past in missing]
        while rows:
            chunk: list[tuple[Job, int, list[int]]] = []
            room = self._max_tokens
            while rows and room:
                job, past, ids = rows.pop(0)
                new = ids[past : past + room]
                chunk.append((job, past, new))
                room -= len(new)
                if past + len(new) < len(ids):
                    rows.insert(0, (job, past + len(new), ids))
            tables, past_tokens = [job.pages for job, _, _ in chunk], [past for _, past, _ in chunk]
            context = PagedContext.of_chunks(pool, tables, past_tokens, [len(new) for _, _, new in chunk])
            tokens = [token for _, _, new in chunk for token in new]
            self._forward.hidden(to_device([tokens], torch.int64, pool.device), context)
            self._stats["prefill_tokens"] += len(tokens)
