"""A decode step of paged rows: forward pass, sampler, and the checks that end a row, eager or as one CUDA graph."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.generation.native.paged.context import PagedContext
from hone.generation.native.paged.pool import PagePool
from hone.generation.native.paged.table import RowTable
from hone.generation.native.paged.transfer import to_device
from hone.generation.native.rows import HostWork
from hone.generation.native.sampler import Allowed, RowSampling, sample
from hone.generation.native.scheduler import Job
from hone.models.module_forward import Forward

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
