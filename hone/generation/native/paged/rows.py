"""Rows whose KV cache is pages of a pool: implements :class:`hone.generation.native.rows.RowStore` for CUDA.

A step and what the host does meanwhile:

    device    | step k            | step k + 1         |
    host        launch k + 1, wait for the results of k: ended rows leave, and their token of step k + 1 is dropped

The host waits once a step, for results that the device computed while the host prepared the next step. Rows whose tokens the host
has to follow (stop strings, constraints) are read in the step itself. A row that reaches its limit is read in time too: the host knows
when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from hone.config.limits import PREFILL_TOKENS
from hone.data.types import StopReason
from hone.generation.native.cache import closing_moves
from hone.generation.native.paged.decoding import (
    LOG_PROB,
    NOT_FINITE,
    REASONS,
    SAMPLING_LOG_PROB,
    STOPPED,
    TOKEN,
    CaptureError,
    Decoder,
    Occurrences,
    StepGraphs,
    report_eager,
    size_of_graph,
)
from hone.generation.native.paged.pool import OutOfPages, PagePool, Pages, PageShape, pages_for
from hone.generation.native.paged.prompts import Prompts
from hone.generation.native.paged.support import number_of_pages
from hone.generation.native.paged.table import RowTable
from hone.generation.native.paged.transfer import Arriving, Readback
from hone.generation.native.rows import CacheLimits, End, HostWork, LastToken, RowStore, not_finite
from hone.generation.native.sampler import RowSampling
from hone.generation.native.scheduler import Job, Sampled
from hone.generation.native.sessions import CachedTurn, SessionCache
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
