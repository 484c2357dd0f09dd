"""Rows whose KV cache is pages of a pool: implements :class:`hone.generation.native.rows.RowStore` for CUDA.

A step and what the host does meanwhile:

    device    | step k            | step k + 1         |
    host        launch k + 1, wait for the results of k: ended rows leave, and their token of step k + 1 is dropped

The host waits once a step, for results that the device computed while the host prepared the next step. Rows whose tokens the host
has to follow (stop strings, constraints) are read in the step itself. A row that reaches its limit is read in time too: the host knows
when.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.config.limits import PREFILL_TOKENS
from hone.data.types import StopReason
from hone.generation.native.cache import closing_moves
from hone.generation.native.paged.pool import (
    SCRATCH,
    Arriving,
    OutOfPages,
    PagePool,
    Pages,
    PageShape,
    Readback,
    pages_for,
    to_device,
)
from hone.generation.native.paged.support import number_of_pages
from hone.generation.native.paged.table import RowTable
from hone.generation.native.rows import CacheLimits, End, HostWork, LastToken, RowStore, not_finite
from hone.generation.native.sampler import Allowed, RowSampling, sample
from hone.generation.native.scheduler import Job, Sampled
from hone.generation.native.sessions import CachedTurn, SessionCache
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.models.attention.paged import CachedPrompts, RowPages
from hone.models.module_forward import Forward

AHEAD = 16
"""Steps before its page is full from which a row gets the next one, if another row needs one now and pages are free."""
_SPARE = 100
"""One page in this many stays free when jobs enter, for rows that grow."""
_NEVER = 1 << 62


class _Memory(NamedTuple):
    """The objects of a cache that has memory."""

    pool: PagePool
    pages: Pages
    table: RowTable
    decoder: Decoder


class _Launched(NamedTuple):
    """A step whose results are on their way."""

    jobs: list[Job]
    results: Arriving


class PagedRows(RowStore[list[int]]):
    """The running rows and the pages of their tokens."""

    def __init__(
        self,
        forward: Forward,  # forward pass of a Llama-shaped model
        shape: PageShape,
        limits: CacheLimits,
        *,
        weights: int,  # bytes of the engine's weights, which count into its share of the memory
        vocabulary: int,  # number of tokens
        stats: dict[str, int],  # counters to update
        device: torch.device,
        no_graphs: str | None,  # why steps are launched operator by operator; None for CUDA graphs
        outside: Tensor | None = None,  # see :func:`hone.generation.native.sampler.sample`
    ) -> None:
        # kept turns give their pages to rows that need them
        super().__init__(SessionCache(limits.max_num_seqs * limits.max_model_len, on_drop=self._release_turn), stats)
        self._forward, self._shape, self._limits, self._weights = forward, shape, limits, weights
        self._vocabulary, self._device, self._no_graphs, self._outside = vocabulary, device, no_graphs, outside
        self._prompts = Prompts(forward, self.sessions, stats, max_tokens=PREFILL_TOKENS)
        self._readback = Readback(4 * limits.max_num_seqs, device)
        self._memory: _Memory | None = None
        self._graphs: dict[int, StepGraphs] = {}
        self._launched: _Launched | None = None
        self._arrived: list[tuple[list[Job], Tensor]] = []
        self._forget_rows()

    @property
    def cache_tokens(self) -> int:
        return self._memory.pages.in_use * self._shape.tokens if self._memory else 0

    @property
    def max_cache_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self._memory.pages.count - 1) * self._shape.tokens if self._memory else self._limits.tokens

    @property
    def graphs(self) -> int:
        return sum(map(len, self._graphs.values()))

    # entering --------------------------------------------------------------------------------------------------------

    def admission(self, waiting: Sequence[Job], version: int) -> PageAdmission:
        del waiting
        memory = self._allocated()
        free = memory.pages.free + self._prompts.droppable(memory.pages)
        return PageAdmission(self.running, version, free, memory.pages.count // _SPARE, self._shape.tokens)

    def enter(self, jobs: Sequence[Job], version: int) -> None:
        memory = self._allocated()
        for job in jobs:
            job.entered = self.steps - len(job.sampled.tokens)
        self._prompts.fill(memory.pool, memory.pages, self.running, jobs, version)
        memory.table.enter(len(self.running), jobs)
        self.running = [*self.running, *jobs]
        self._forget_rows()
        self._stats["peak_cache_tokens"] = max(self._stats["peak_cache_tokens"], self.cache_tokens)

    def withdraw(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._release(job)

    def _allocated(self) -> _Memory:
        if self._memory is None:
            count = number_of_pages(self._shape, self._limits, self._weights, self._device)
            pool = PagePool(self._shape, count, self._device)
            longest = pages_for(self._limits.max_model_len, self._shape.tokens)
            table = RowTable(self._limits.max_num_seqs, longest, self._device)
            self._memory = _Memory(pool, Pages(count), table, Decoder(self._forward, pool, table, self._outside))
        return self._memory

    # one step --------------------------------------------------------------------------------------------------------

    def step(self, work: HostWork) -> list[End]:
        """Launch a step for every row and return the rows that are known to end, usually with the step before."""
        at_once = work != HostWork() or self._sampling_of_rows().penalises or self._sampling_of_rows().counts
        if self._launched and (at_once or self.steps >= self._full_step) and (ends := self.settle()):
            return ends
        if self.steps >= self._page_step:
            ends = self._grow()
            if ends or self.preempted:
                return ends
        results = self._compute(work)
        self.steps += 1
        self._stats["steps"] += 1
        before, self._launched = self._launched, _Launched(self.running, self._readback.send(results))
        ends = self._read(before) if before else []
        return self.settle(work) if at_once else ends

    def settle(self, work: HostWork | None = None) -> list[End]:
        launched, self._launched = self._launched, None
        return self._read(launched, work) if launched else []

    def _compute(self, work: HostWork) -> Tensor:
        """Launch a step, as a graph if no row needs more than that; return its results on the device."""
        _, _, table, decoder = self._allocated()
        rows, sampling = len(self.running), self._sampling_of_rows()
        if reason := self._no_graphs or _eager_reason(work, sampling):
            if self._device.type == "cuda":
                report_eager(reason)
            if (sampling.penalises or sampling.counts) and self._occurrences is None:
                self._note_arrived()
                self._occurrences = Occurrences(self.running, sampling, self._vocabulary, self._device)
            allowed = work.allowed() if work.allowed else None
            return decoder.step(rows, sampling, self._occurrences, allowed, work)
        size = size_of_graph(rows, table.rows)
        graphs = self._graphs.setdefault(table.generation, StepGraphs())
        params = [job.request.sampling for job in self.running]

        def step() -> Tensor:
            return decoder.step(size, table.sampling(size, params))

        try:
            return graphs.run((size, sampling.truncates, sampling.greedy), step, table)
        except CaptureError as error:
            self._no_graphs = f"its capture failed: {error}"
            return self._compute(work)

    def _sampling_of_rows(self) -> RowSampling:
        if self._sampling is None:
            params = [job.request.sampling for job in self.running]
            self._sampling = self._allocated().table.sampling(len(params), params)
        return self._sampling

    def _read(self, launched: _Launched, work: HostWork | None = None) -> list[End]:
        """Wait for the results of a step and return the rows that end with it and have not left since."""
        results, jobs = launched.results.wait(), launched.jobs
        self._arrived.append((jobs, results))
        rows: Mapping[Job, int] | None = None
        if jobs is not self.running:
            rows = {job: row for row, job in enumerate(self.running)}
        self._stats["decode_tokens"] += len(jobs) if rows is None else sum(job in rows for job in jobs)
        ended: Mapping[int, LastToken] = {}
        if work and work.follow:
            ended = work.follow([[token] for token in results[TOKEN, : len(jobs)].tolist()])
        reasons = results[REASONS, : len(jobs)]
        places = {*reasons.nonzero()[:, 0].tolist(), *ended}
        ends = []
        for place in sorted(places):
            row = place if rows is None else rows.get(jobs[place])
            if row is None:
                continue
            bits, last = int(reasons[place]), ended.get(place)
            complete = last is not None and last.error is None
            error = (last.error if last else None) or (not_finite() if bits & NOT_FINITE else None)
            ends.append(End(row, StopReason.STOP if bits & STOPPED or complete else StopReason.LENGTH, error))
        return ends

    def _grow(self) -> list[End]:
        """Give a page to each row whose next token needs one, and to those that need one soon if pages are free.

        If none is free, the rows that entered last leave (``preempted``), unless rows are known to end, which frees pages. The rows that
        stay have their pages before a job can enter again.
        """
        while not self._take_pages():
            if ends := self.settle():
                return ends
            self._preempt()
        self._page_step = min(map(self._full_page_step, self.running), default=_NEVER)
        self._stats["peak_cache_tokens"] = max(self._stats["peak_cache_tokens"], self.cache_tokens)
        return []

    def _take_pages(self) -> bool:
        """Take the pages of :meth:`_grow`; return False if there are too few."""
        memory, enough = self._allocated(), True
        added: list[tuple[int, int, int]] = []
        for row, job in enumerate(self.running):
            full = self._full_page_step(job)
            soon = full <= self.steps + AHEAD < job.entered + job.request.sampling.max_tokens
            if full <= self.steps or (soon and memory.pages.free > len(self.running)):
                try:
                    (page,) = self._prompts.take(memory.pages, 1)
                except OutOfPages:
                    enough = False
                    break
                added.append((row, len(job.pages), page))
                job.pages.append(page)
        if added:
            memory.table.add_pages(added)
        return enough

    def _full_page_step(self, job: Job) -> int:
        """Return the step whose token no longer fits into the job's pages."""
        return job.entered + len(job.pages) * self._shape.tokens - (len(job.request.prompt_ids) - 1)

    def _preempt(self) -> None:
        """Take the row of the job that entered last; it keeps its tokens and waits for a row again."""
        row = max(range(len(self.running)), key=lambda row: (self.running[row].started, row))
        assert len(self.running) > 1, "a single sequence fits: requests that do not are refused"
        self._note_arrived()
        self.preempted.insert(0, self.running[row])
        self._stats["preemptions"] += 1
        self.remove({row})

    # leaving ---------------------------------------------------------------------------------------------------------

    def sampled(self, rows: Sequence[int]) -> list[Sampled]:
        """Return the tokens of each row that have arrived."""
        self._note_arrived()
        return [self.running[row].sampled for row in rows]

    def _note_arrived(self) -> None:
        running, arrived = set(map(id, self.running)), self._arrived
        self._arrived = []
        for _, group in groupby(arrived, key=lambda entry: id(entry[0])):
            entries = list(group)
            jobs = entries[0][0]
            results = torch.stack([results[:, : len(jobs)] for _, results in entries], 2)  # [4, A, steps]
            tokens = results[TOKEN].tolist()
            floats = [results[part].view(torch.float32).tolist() for part in (LOG_PROB, SAMPLING_LOG_PROB)]
            for job, *columns in zip(jobs, tokens, *floats, strict=True):
                if id(job) in running:
                    for values, new in zip(job.sampled, columns, strict=True):
                        values.extend(new)

    def keep_for_session(self, row: int, tokens: list[int], version: int) -> None:
        job = self.running[row]
        session = job.request.session
        if session is not None and self._memory is not None:
            ids = [*job.request.prompt_ids, *tokens][:-1]
            pages = job.pages[: pages_for(len(ids), self._shape.tokens)]
            self._memory.pages.share(pages)
            self.sessions.put(session, CachedTurn(ids, version, pages))

    def remove(self, rows: set[int]) -> None:
        self._note_arrived()
        before, left = len(self.running), len(self.running) - len(rows)
        for row in rows:
            self._release(self.running[row])
        order = list(range(left))
        for gap, mover in zip(*closing_moves(before, rows), strict=True):
            order[gap] = mover
        self._allocated().table.keep(order, before)
        self.running = [self.running[row] for row in order]
        if not self.running:
            self._launched = None  # its tokens are of rows that have left
        self._forget_rows()

    def _release(self, job: Job) -> None:
        if self._memory is not None:
            self._memory.pages.release(job.pages)
        job.pages = []

    def _release_turn(self, pages: list[int]) -> None:
        if self._memory is not None:
            self._memory.pages.release(pages)

    def _forget_rows(self) -> None:
        """Forget what follows from the rows, after rows enter or leave."""
        self._sampling: RowSampling | None = None
        self._occurrences: Occurrences | None = None
        self._page_step = self.steps  # looks at the pages in the next step
        self._full_step = min((job.entered + job.request.sampling.max_tokens for job in self.running), default=_NEVER)

    def release(self) -> None:
        self._graphs = {}

    def clear(self) -> None:
        """Drop all rows, and the memory: after an error of the device it may not answer."""
        for job in self.running:
            job.pages = []
        self._launched, self._arrived, self.running = None, [], []
        self.free()
        self._forget_rows()

    def free(self) -> None:
        """Give all pages back; no row may be running. The next jobs that enter take pages again."""
        self._memory = None
        self.sessions.clear()
        self.release()


class PageAdmission:
    """Admission to free pages: a job needs those of its tokens that it does not share with a job of the same prompt.

    Args:
        running: jobs with a row.
        version: of the weights that serve the waiting jobs.
        free: pages that are free, or used by kept turns alone.
        spare: pages that stay free for rows that grow, once there are rows.
    """

    def __init__(self, running: Sequence[Job], version: int, free: int, spare: int, page_tokens: int) -> None:
        self._prompts = {(job.prompt, job.version) for job in running}
        self._version, self._free, self._spare, self._page_tokens = version, free, spare, page_tokens

    def admit(self, job: Job) -> bool:
        """Return whether the job fits."""
        key = (job.prompt, self._version)
        needed = pages_for(len(job.ids), self._page_tokens)
        if key in self._prompts:
            needed -= (len(job.request.prompt_ids) - 1) // self._page_tokens
        if needed + (self._spare if self._prompts else 0) > self._free:
            return False
        self._free -= needed
        self._prompts.add(key)
        return True


def _eager_reason(work: HostWork, sampling: RowSampling) -> str | None:
    """Return why the rows need a step outside a graph, or None."""
    if work.allowed:
        return "a request has a constraint"
    if work.keep_alternatives:
        return "a request asks for the likeliest tokens"
    if work.keep_support:
        return "a request asks for the support of its tokens (rollout.keep_support)"
    if sampling.penalises or sampling.counts:
        return "a request has a penalty"
    if sampling.bias.shape[1]:
        return "a request has a logit bias"
    return None


log = logging.getLogger("hone.generation.native")

STOPPED, FULL, NOT_FINITE = 1, 2, 4
"""Bits of the reasons why a row ends."""
TOKEN, LOG_PROB, SAMPLING_LOG_PROB, REASONS = range(4)
"""Rows of a step's results; the log-probs are the bits of float32 numbers."""


class Decoder:
    """Computes decode steps.

    Args:
        outside: see :func:`hone.generation.native.sampler.sample`.
    """

    def __init__(self, forward: Forward, pool: PagePool, table: RowTable, outside: Tensor | None = None) -> None:
        self._forward, self._pool, self._table, self._outside = forward, pool, table, outside

    def step(
        self,
        rows: int,
        sampling: RowSampling,
        occurrences: Occurrences | None = None,
        allowed: Allowed | None = None,
        work: HostWork | None = None,
    ) -> Tensor:
        """Sample one token for each of the first rows of the table, as ``[4, rows]`` int32: see :data:`TOKEN`.

        Without the last three arguments neither a shape nor a branch depends on the numbers of a tensor, so that a graph can
        repeat it. ``work`` gets the logits and the support of the tokens.
        """
        table = self._table
        context = PagedContext.of_step(self._pool, table.pages(rows), table.lengths(rows))
        logits = self._forward.logits(table.next_tokens(rows)[:, None], context)[:, -1]
        seen, counts = (occurrences.seen, occurrences.counts) if occurrences else (None, None)
        tokens, log_probs, sampling_log_probs, support = sample(
            logits, sampling, table.generated(rows), seen, counts, allowed, self._outside
        )
        if work is not None and work.keep_alternatives is not None:
            work.keep_alternatives(range(rows), logits, sampling)
        if work is not None and work.keep_support is not None and support is not None:
            work.keep_support(range(rows), support)
        if occurrences is not None:
            occurrences.add(tokens)
        table.record(tokens)
        finite = (log_probs + sampling_log_probs).isfinite()
        reasons = STOPPED * table.stopped(rows) + FULL * table.full(rows) + NOT_FINITE * ~finite
        bits = (values.contiguous().view(torch.int32) for values in (log_probs, sampling_log_probs))
        return torch.stack([tokens.to(torch.int32), *bits, reasons.to(torch.int32)])


class Occurrences:
    """Tokens that occurred in rows, for penalties.

    ``seen [A, V]`` bool is about prompt and response, None without a repetition penalty; ``counts [A, V]`` int32 about the
    response, None without a presence or frequency penalty.
    """

    def __init__(self, jobs: Sequence[Job], sampling: RowSampling, vocabulary: int, device: torch.device) -> None:
        self.seen = self.counts = None
        shape = len(jobs), vocabulary
        if sampling.penalises:
            places = [(row, token) for row, job in enumerate(jobs) for token in job.ids]
            self.seen = torch.zeros(shape, dtype=torch.bool, device=device)
            self.seen[to_device(places, torch.int64, device).unbind(1)] = True
        if sampling.counts:
            places = [(row, token) for row, job in enumerate(jobs) for token in job.sampled.tokens]
            self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
            index = to_device(places, torch.int64, device).view(-1, 2)
            self.counts.index_put_(index.unbind(1), torch.ones_like(index[:, 0], dtype=torch.int32), accumulate=True)

    def add(self, tokens: Tensor) -> None:
        place = tokens[:, None]
        if self.seen is not None:
            self.seen.scatter_(1, place, True)
        if self.counts is not None:
            self.counts.scatter_add_(1, place, torch.ones_like(place, dtype=torch.int32))


class CaptureError(RuntimeError):
    """A step cannot be a CUDA graph."""


class StepGraphs:
    """CUDA graphs of decode steps, one for each size of the batch and way of sampling; all allocate from one pool."""

    def __init__(self) -> None:
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: object, step: Callable[[], Tensor], table: RowTable) -> Tensor:
        """Repeat the step that ``key`` names, captured at the first call; its results are in the same memory every time."""
        if key not in self._graphs:
            self._graphs[key] = self._capture(step, table)
        graph, results = self._graphs[key]
        graph.replay()
        return results

    def _capture(self, step: Callable[[], Tensor], table: RowTable) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a step. Its kernels are loaded by one that is undone; the keys and values that this writes are those of the next."""
        before, stream = table.saved(), _capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        table.restore(before)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the trainer's process may use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                results = step()
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        self._pool = graph.pool()
        return graph, results


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures on a device: torch keeps a workspace of cuBLAS for every stream that ever multiplied."""
    return torch.cuda.Stream(device)


def size_of_graph(rows: int, most: int) -> int:
    """Return the number of rows of the graph that decodes ``rows`` rows: a power of two, or three quarters of one from 24 on."""
    size = 1 << (rows - 1).bit_length()
    return min(size * 3 // 4 if size >= 32 and rows <= size * 3 // 4 else size, most)


@functools.cache
def report_eager(reason: str) -> None:
    """Log once for each reason that steps are launched operator by operator."""
    log.warning("decode steps run without a CUDA graph, which takes more time of the host: %s", reason)


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
