"""Rows whose KV cache is one tensor a layer, and the prompts that several rows share in another.

Attention over them is a few matmuls over contiguous memory, which a CPU computes fastest.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hone.config.limits import PREFILL_TOKENS
from hone.data.image_processor import ImageProcessor
from hone.data.types import ExpertIds, StopReason
from hone.generation.native.batch import RowState
from hone.generation.native.cache import EXPERTS, KVCache, RowEntries, closing_moves, columns, with_spare
from hone.generation.native.contexts import DecodeContext, Prefill, RowExtent, rope_offsets
from hone.generation.native.prefixes import PrefixGroups, SharedPrefixes
from hone.generation.native.rows import End, HostWork, LastToken, RowStore, not_finite
from hone.generation.native.sampler import Draws, RowSampling, sample
from hone.generation.native.scheduler import Job, RectangleAdmission, Sampled
from hone.generation.native.sessions import CachedTurn, SessionCache
from hone.generation.native.speculative import Speculation
from hone.generation.native.speculative.verification import DraftedContext, Verification, all_of_row
from hone.models.module_forward import Forward
from hone.models.registry import entries_per_token, family_of


class ContiguousRows(RowStore[RowEntries]):
    """Rows of one KV tensor a layer. None is ever preempted: admission reserves the longest responses."""

    def __init__(
        self,
        forward: Forward,  # forward pass of the model
        config: Any,  # of the model, for the family's layer cache
        *,
        vocabulary: int,  # number of tokens
        stats: dict[str, int],  # counters to update
        device: torch.device,
        dtype: torch.dtype,  # of the cache
        max_cache_tokens: int,  # capacity of the cache; the session KV cache has the same capacity in addition
        keeps_experts: bool = False,  # whether ``forward`` passes the experts of each token to its context
        processor: ImageProcessor | None = None,  # of the model's images; None for a model of text
        speculation: Speculation | None = None,  # drafts tokens, which a step verifies; None for one token a step
        outside: Tensor | None = None,
    ) -> None:
        self._forward, self._vocabulary, self._device, self._outside = forward, vocabulary, device, outside
        self.max_cache_tokens, self.keeps_experts = max_cache_tokens, keeps_experts
        self._processor, self._speculation = processor, speculation
        new_layer = functools.partial(family_of(config.model_type).layer_cache, config)
        # whether the caches of all layers have one entry per token, so that rows can share prefixes
        self.per_token = entries_per_token(config)
        # the tokens of each row: all of them, or those after a shared prefix
        self.cache = KVCache(device, dtype, new_layer)
        self.prefixes = SharedPrefixes(KVCache(device, dtype, new_layer))  # the shared prefixes
        super().__init__(SessionCache(max_cache_tokens, per_token=self.per_token), stats)
        self._prefill = Prefill(
            forward, self.sessions, stats, device=device, max_tokens=PREFILL_TOKENS, processor=processor
        )
        self.state: RowState | None = None  # of the rows; None without rows
        self.sampling: RowSampling | None = None  # parameters of the rows; None without rows
        self._groups: PrefixGroups | None = None
        self._extent_before: RowExtent | None = None  # of the same rows at step 0, as if they had decoded since

    @property
    def cache_tokens(self) -> int:
        return self.cache.tokens + self.prefixes.cache.tokens

    def row_tokens(self, job: Job) -> int:
        return job.prompt_in_row + self.num_sampled(job)

    # entering --------------------------------------------------------------------------------------------------------

    def admission(self, waiting: Sequence[Job], version: int) -> RectangleAdmission:
        return RectangleAdmission(
            self.running, waiting, version, limit=self.max_cache_tokens, share_prompts=self.per_token
        )

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Move the prompts of all rows to shared slots, if an entering job shares a prompt."""
        if not jobs[0].in_row and any(job.in_row for job in self.running):
            self._share_prompts()

    def enter(self, jobs: Sequence[Job], version: int) -> None:
        for job in jobs:
            job.entered = self.steps
        self._fill(jobs, version)
        requests = [job.request for job in jobs]
        in_rows, offsets = [job.prompt_in_row for job in jobs], rope_offsets(self._processor, requests)
        state = RowState.from_requests(requests, in_rows, self._vocabulary, self._device, offsets)
        sampling = RowSampling.from_params([r.sampling for r in requests], [r.seed for r in requests], self._device)
        if self.state is not None and self.sampling is not None:
            state, sampling = self.state.join(state), self.sampling.join(sampling)
        self.state, self.sampling = state, sampling
        self.running = [*self.running, *jobs]
        self._groups = self._extent_before = None

    def withdraw(self, jobs: Sequence[Job]) -> None:
        """Release the slots of jobs that did not enter; they are the last ones."""
        self.prefixes.release(job.slot for job in jobs if job.slot >= 0)
        for job in jobs:
            job.slot = -1

    def _fill(self, jobs: Sequence[Job], version: int) -> None:
        """Prefill prompts. Equal prompts are prefilled once; the session KV cache is reused.

        They are stored in the rows of the jobs while no row shares a prompt, else in shared slots.
        """
        in_rows = jobs[0].in_row
        used_slots, entering = self.prefixes.count, []
        first_row: dict[bytes, int] = {}
        copies: list[tuple[int, int]] = []
        for row, job in enumerate(jobs, len(self.running)):
            if in_rows:
                new, place = job.prompt not in first_row, row
                copies += [] if new else [(first_row[job.prompt], row)]
                first_row.setdefault(job.prompt, row)
            else:
                job.slot, new = self.prefixes.take(job.prompt, version, job.shared)
                place = job.slot
            if new:
                entering.append((job, place))
            else:
                self._stats["prefix_hits"] += 1
                self._stats["cached_tokens"] += len(job.request.prompt_ids) - 1
        self._reserve(self.running, jobs, used_slots, self._longest_row((*self.running, *jobs)) + 1)
        cache = self.cache if in_rows else self.prefixes.cache
        self._prefill.fill(cache, [(job.request, place) for job, place in entering], version)
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        self.cache.copy_rows(sources, targets, max((len(job.request.prompt_ids) - 1 for job in jobs), default=0))

    def _share_prompts(self) -> None:
        assert self.state is not None
        rows = [self.cache.read_row(row, self.row_tokens(job)) for row, job in enumerate(self.running)]
        moved_tokens = [job.prompt_in_row for job in self.running]
        for job in self.running:
            job.in_row = False
            job.slot, _ = self.prefixes.take(job.prompt, job.version, job.shared)
        self._extent_before = None
        self._reserve([], self.running, 0, self._longest_row(self.running) + 1)
        for row, (job, entries) in enumerate(zip(self.running, rows, strict=True)):
            self.prefixes.cache.write_row(job.slot, job.shared, entries)
            sampled = {layer: tuple(kv[:, job.shared :] for kv in tensors) for layer, tensors in entries.items()}
            self.cache.write_row(row, self.num_sampled(job), sampled)
        self.state = self.state.with_shared_prefixes(moved_tokens)

    def _longest_row(self, jobs: Sequence[Job]) -> int:
        return max(map(self.row_tokens, jobs))

    def _reserve(self, cached: Sequence[Job], entering: Sequence[Job], slots: int, needed: int) -> None:
        """Grow both caches for ``cached`` rows, ``entering`` jobs, and the prefixes after ``slots`` used slots.

        The longest row of the next pass has ``needed`` tokens.

        On the CPU the capacity grows with the rows. Elsewhere rows get the capacity of their longest possible sequence at once,
        which avoids fragmentation.
        """
        jobs, limit, prefix_cache = (*cached, *entering), self.max_cache_tokens, self.prefixes.cache
        longest = max(job.max_row_tokens for job in jobs)
        generous = with_spare(needed if self._device.type == "cpu" else longest)
        wanted = (len(jobs), min(generous, longest)), (self.prefixes.count, self.prefixes.longest)
        self.cache.reserve(*wanted[0], used=len(cached), generous=generous, limit=limit - prefix_cache.tokens)
        prefix_cache.reserve(*wanted[1], used=slots, generous=self.prefixes.longest, limit=limit - self.cache.tokens)
        if self.cache_tokens > limit:  # the exact sizes fit: the admission has checked it
            self.cache.resize(*wanted[0], used=len(cached))
            prefix_cache.resize(*wanted[1], used=slots)
        self._stats["peak_cache_tokens"] = max(self._stats["peak_cache_tokens"], self.cache_tokens)

    def _fit_rows(self, longest: int) -> None:
        """Set the capacity of rows to at least ``longest`` tokens, and on the CPU little more."""
        capacity = self.cache.capacity
        if longest > capacity:
            self._reserve(self.running, [], self.prefixes.count, longest)
            self._groups = None  # the slots may have moved
        elif self._device.type == "cpu" and columns(longest, capacity) < capacity:
            self.cache.resize(self.cache.rows, with_spare(longest), used=len(self.running))

    # one step --------------------------------------------------------------------------------------------------------

    def step(self, work: HostWork) -> list[End]:
        """Sample a token for every row, and more where drafts are right; return the rows that end."""
        assert self.state is not None
        verification = self._draft()
        logits, sampling, draws = self._sample(work, verification)
        self.steps += 1
        self._stats["steps"] += 1
        rows, counts, last = range(len(self.running)), None, {}
        if self._speculation is not None or work.follow is not None:
            tokens, last = self._keep(draws.tokens.tolist(), verification, work)
            if verification is not None:
                counts = torch.tensor(list(map(len, tokens)), device=self._device)
                index = verification.index(counts)
                logits, sampling, draws = logits[index], sampling.select(index), draws.select(index)
                rows = [row for row, new in enumerate(tokens) for _ in new]
        if work.keep_alternatives:
            work.keep_alternatives(rows, logits, sampling)
        if work.keep_support and draws.support is not None:
            work.keep_support(rows, draws.support)
        self.state.record(draws.tokens, draws.log_probs, draws.sampling_log_probs, counts)
        self._stats["decode_tokens"] += len(rows)
        finite = (draws.log_probs + draws.sampling_log_probs).isfinite()
        return self._ends(finite if counts is None else all_of_row(finite, counts), last)

    def _draft(self) -> Verification | None:
        """Return the drafts of the rows, to be verified in this step; None if there are none."""
        if self._speculation is None or not self.per_token:
            return None
        drafts = self._speculation.drafts(self.running, self.num_sampled, self._vocabulary)
        return Verification(drafts, self._device) if any(drafts) else None

    def _sample(self, work: HostWork, verification: Verification | None) -> tuple[Tensor, RowSampling, Draws]:
        """Compute the logits of every row's next token, or of all tokens that are verified, and sample from them.

        Returns:
            Logits, sampling parameters and samples of the ``N`` tokens, one per row without a verification.
        """
        state, sampling = self.state, self.sampling
        assert state is not None and sampling is not None
        extent = self._extent()
        longest = extent.longest + 1 if verification is None else self._longest_with(verification)
        self._fit_rows(longest)
        if self._groups is None and not self.running[0].in_row:
            self._groups = PrefixGroups([job.slot for job in self.running], self.prefixes)
        seen, counts = state.seen if sampling.penalises else None, state.counts if sampling.counts else None
        allowed = work.allowed() if work.allowed else None
        if verification is None:
            context = DecodeContext(self.cache, state.length, state.shared, extent, self._groups, state.rope_offset)
            logits = self._forward.logits(state.next_token[:, None], context)[:, -1]
            return logits, sampling, sample(logits, sampling, state.generated, seen, counts, allowed, self._outside)
        places = verification.places
        context = DraftedContext(
            self.cache, state.length, state.shared, longest, self._groups, places, state.rope_offset
        )
        logits = self._forward.logits(verification.input_ids(state.next_token), context)[0]
        sampling, counters = sampling.select(places.row), state.generated[places.row] + places.offset
        # a row with penalties or a constraint has one token, so what occurred in it, and what it allows, is that of this token
        seen, counts = (None if marks is None else marks[places.row] for marks in (seen, counts))
        if allowed is not None:
            allowed = replace(allowed, rows=places.first[allowed.rows])
        return logits, sampling, sample(logits, sampling, counters, seen, counts, allowed, self._outside)

    def _longest_with(self, verification: Verification) -> int:
        return max(self.row_tokens(job) + new for job, new in zip(self.running, verification.lengths, strict=True))

    def _keep(
        self, sampled: list[int], verification: Verification | None, work: HostWork
    ) -> tuple[list[list[int]], Mapping[int, LastToken]]:
        """Return which of the sampled tokens each row keeps, and the rows that stop strings and constraints end."""
        tokens = [[token] for token in sampled]
        if verification is not None:
            params = [job.request.sampling for job in self.running]
            tokens = verification.accept(sampled, [() if p.ignore_eos else p.stop_token_ids for p in params])
        last = work.follow(tokens) if work.follow else {}
        tokens = [new[: last[row].kept] if row in last else new for row, new in enumerate(tokens)]
        if verification is not None:
            drafted, right = verification.counts(tokens)
            self._stats["drafted_tokens"] += drafted
            self._stats["accepted_tokens"] += right
            for job, new in zip(self.running, tokens, strict=True):
                job.entered -= len(new) - 1
            self._extent_before = None
        if self._speculation is not None:
            self._speculation.append(self.running, tokens)
        return tokens, last

    def _ends(self, finite: Tensor, last: Mapping[int, LastToken]) -> list[End]:
        """Return the rows that end with their last token; ``finite [A]`` says whether a row's new log-probs are."""
        assert self.state is not None
        stopped = self.state.stopped
        ended = stopped | self.state.full | ~finite
        if last:
            ended = ended.index_fill(0, torch.tensor(list(last), device=self._device), True)
        if not bool(ended.any()):
            return []
        stops, unusable = stopped.tolist(), (~finite).tolist()
        ends = []
        for row in ended.nonzero()[:, 0].tolist():
            token = last.get(row, LastToken(0))
            complete = row in last and token.error is None
            error = token.error or (not_finite() if unusable[row] else None)
            ends.append(End(row, StopReason.STOP if stops[row] or complete else StopReason.LENGTH, error))
        return ends

    def _extent(self) -> RowExtent:
        """Return the extent of the rows, from their jobs when rows have entered or left; a step adds one token to each."""
        if self._extent_before is None:
            lengths = [self.row_tokens(job) - self.steps for job in self.running]
            self._extent_before = RowExtent(min(lengths), max(lengths), min(job.shared for job in self.running))
        shortest, longest, least_shared = self._extent_before
        return RowExtent(shortest + self.steps, longest + self.steps, least_shared)

    def sampled(self, rows: Sequence[int]) -> list[Sampled]:
        state = self.state
        assert state is not None
        index = torch.tensor(rows, device=self._device)
        columns = [values[index].tolist() for values in (state.tokens, state.log_probs, state.sampling_log_probs)]
        counts = [self.num_sampled(self.running[row]) for row in rows]
        return [Sampled(*(values[:count] for values in row)) for count, *row in zip(counts, *columns, strict=True)]

    # leaving ---------------------------------------------------------------------------------------------------------

    def experts(self, row: int) -> ExpertIds:
        if not self.keeps_experts:
            return ()
        job = self.running[row]
        entries = [self.cache.layer(EXPERTS).read_row(row, self.row_tokens(job))[0]]
        if not job.in_row and job.shared:
            entries.insert(0, self.prefixes.cache.layer(EXPERTS).read_row(job.slot, job.shared)[0])
        return torch.cat(entries, 1).flatten().cpu().numpy()

    def keep_for_session(self, row: int, tokens: list[int], version: int) -> None:
        """Copy prompt and row to the session KV cache; the last sampled token is not in the cache yet."""
        job = self.running[row]
        session = job.request.session
        if session is not None:
            ids = [*job.request.prompt_ids, *tokens][:-1]
            entries = self.cache.read_row(row, job.prompt_in_row + len(tokens))
            if not job.in_row:
                entries = _concatenated(self.prefixes.cache.read_row(job.slot, job.shared), entries)
            self.sessions.put(session, CachedTurn(ids, version, entries))

    def remove(self, rows: set[int]) -> None:
        """Move the last rows into the gaps of removed rows, and likewise the slots of unused prefixes."""
        assert self.state is not None and self.sampling is not None
        if len(rows) == len(self.running):
            self.clear()
            return
        if self._speculation is not None:
            self._speculation.end([self.running[row] for row in rows])
        gaps, movers = closing_moves(len(self.running), rows)
        self.cache.copy_rows(movers, gaps, max((self.row_tokens(self.running[row]) for row in movers), default=0))
        order = list(range(len(self.running) - len(rows)))
        for gap, mover in zip(gaps, movers, strict=True):
            order[gap] = mover
        moved = self.prefixes.release(self.running[row].slot for row in rows if not self.running[row].in_row)
        self.running = [self.running[row] for row in order]
        for job in self.running:
            job.slot = moved.get(job.slot, job.slot)
        index = torch.tensor(order, device=self._device)
        self.state, self.sampling = self.state.select(index), self.sampling.select(index)
        self._groups = self._extent_before = None

    def begin_version(self) -> None:
        super().begin_version()
        if self._speculation is not None:
            self._speculation.drafter.begin_version()

    def clear(self) -> None:
        if self._speculation is not None:
            self._speculation.end(self.running)
        self.running, self.state, self.sampling = [], None, None
        self._groups = self._extent_before = None
        self.prefixes.clear()

    def free(self) -> None:
        self.cache.free()
        self.prefixes.cache.free()
        self.sessions.clear()
        if self._speculation is not None:
            self._speculation.drafter.free()


def _concatenated(prefix: RowEntries, row: RowEntries) -> RowEntries:
    """Concatenate the entries of a shared prefix (empty if no prompt has entries) and of the row that continues it."""
    if not prefix:
        return row
    return {layer: tuple(torch.cat(pair, 1) for pair in zip(prefix[layer], row[layer], strict=True)) for layer in row}
