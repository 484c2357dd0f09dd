"""State, sampling parameters and pages of the rows, in tensors whose addresses stay, for CUDA graphs.

A row is a column of each tensor. Rows ``0 .. A - 1`` are in use; the columns after them compute, if a batch is filled up to the size
of a graph, a token that no request gets: they read and write the scratch page, and their length stays 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.generation.native.batch import NO_TOKEN
from hone.generation.native.paged.pool import SCRATCH, to_device
from hone.generation.native.sampler import ALL_TOKENS, RowSampling, signed
from hone.generation.native.scheduler import Job
from hone.generation.protocol import SamplingParams

_LENGTH, _NEXT, _GENERATED, _LIMIT, _SEED, _TOP_K, _COUNTS, _STOPS = range(8)
_INTEGERS_OF_NONE = (0, 0, 0, 1, 0, ALL_TOKENS, 0)
_FLOATS_OF_NONE = (1.0, 1.0, 0.0, 1.0, 0.0, 0.0)
"""Temperature, top-p, min-p, penalties for repetition, presence and frequency of a column without a row."""


class RowTable:
    """At most ``rows`` rows of at most ``pages`` pages each, on the device; ``generation`` changes when tensors get other addresses."""

    def __init__(self, rows: int, pages: int, device: torch.device) -> None:
        self._rows, self._device, self.generation = rows, device, 0
        self._pages = torch.full((rows, pages), SCRATCH, dtype=torch.int32, device=device)
        self._integers = self._unused_integers(1, rows)
        self._floats = self._unused_floats(rows)

    @property
    def rows(self) -> int:
        return self._rows

    def pages(self, rows: int) -> Tensor:
        """Return the pages of the first rows, ``[rows, W]`` int32."""
        return self._pages[:rows]

    def lengths(self, rows: int) -> Tensor:
        """Return the cached tokens of the first rows, ``[rows]``."""
        return self._integers[_LENGTH, :rows]

    def next_tokens(self, rows: int) -> Tensor:
        """Return the input of the next step of the first rows, ``[rows]``."""
        return self._integers[_NEXT, :rows]

    def generated(self, rows: int) -> Tensor:
        """Return how many tokens were sampled for the first rows, ``[rows]``."""
        return self._integers[_GENERATED, :rows]

    def stopped(self, rows: int) -> Tensor:
        """Return whether the last sampled token of the first rows is a stop token, ``[rows]``."""
        return (self._integers[_STOPS:, :rows] == self.next_tokens(rows)).any(0)

    def full(self, rows: int) -> Tensor:
        """Return whether the first rows have as many tokens as their requests allow, ``[rows]``."""
        return self.generated(rows) >= self._integers[_LIMIT, :rows]

    def record(self, tokens: Tensor) -> None:
        rows = len(tokens)
        self.next_tokens(rows).copy_(tokens)
        self._integers[:: _GENERATED - _LENGTH][:2, :rows].add_(self._integers[_COUNTS, :rows])  # 0 for unused columns

    def saved(self) -> Tensor:
        """Return a copy of what a step changes."""
        return self._integers.clone()

    def restore(self, saved: Tensor) -> None:
        """Undo the steps since :meth:`saved`."""
        self._integers.copy_(saved)

    def sampling(self, rows: int, params: Sequence[SamplingParams]) -> RowSampling:
        """Return the sampling parameters of the first rows, of which the first ``len(params)`` are in use."""
        temperature, top_p, min_p, repetition, presence, frequency = self._floats[:, :rows].unbind()
        flags = RowSampling.flags(params)
        biased, bias = self._integers.new_empty(rows, 0), self._floats.new_empty(rows, 0)
        if widest := max(len(p.logit_bias) for p in params):
            pairs = [[*p.logit_bias, *[(0, 0.0)] * (widest - len(p.logit_bias))] for p in params]
            biased = to_device([[token for token, _ in row] for row in pairs], torch.int64, self._device)
            bias = to_device([[value for _, value in row] for row in pairs], torch.float32, self._device)
        return RowSampling(
            seeds=self._integers[_SEED, :rows],
            temperature=temperature,
            top_k=self._integers[_TOP_K, :rows],
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            biased=biased,
            bias=bias,
            **flags,
        )

    def enter(self, first: int, jobs: Sequence[Job]) -> None:
        """Put jobs into the rows from ``first`` on: prompts and kept tokens are cached except for the last."""
        stops = [() if job.request.sampling.ignore_eos else job.request.sampling.stop_token_ids for job in jobs]
        self._fit_stops(max(map(len, stops)))
        widest, rows = len(self._integers) - _STOPS, slice(first, first + len(jobs))
        integers, floats, pages = [], [], []
        for job, ids in zip(jobs, stops, strict=True):
            params, tokens, sampled = job.request.sampling, job.ids, len(job.sampled.tokens)
            top_k = params.top_k if params.top_k > 0 else ALL_TOKENS
            state = [len(tokens) - 1, tokens[-1], sampled, params.max_tokens, signed(job.request.seed), top_k, 1]
            integers.append([*state, *ids, *[NO_TOKEN] * (widest - len(ids))])
            penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            floats.append([params.temperature, params.top_p, params.min_p, *penalties])
            pages.append([*job.pages, *[SCRATCH] * (self._pages.shape[1] - len(job.pages))])
        self._integers[:, rows] = to_device(integers, torch.int64, self._device).t()
        self._floats[:, rows] = to_device(floats, torch.float32, self._device).t()
        self._pages[rows] = to_device(pages, torch.int32, self._device)

    def keep(self, order: Sequence[int], before: int) -> None:
        """Keep rows ``order`` of ``before`` rows, in this order, as the first ones."""
        kept, index = len(order), to_device(order, torch.int64, self._device)
        self._integers[:, :kept] = self._integers.index_select(1, index)
        self._floats[:, :kept] = self._floats.index_select(1, index)
        self._pages[:kept] = self._pages.index_select(0, index)
        unused = before - kept
        self._integers[:, kept:before] = self._unused_integers(len(self._integers) - _STOPS, unused)
        self._floats[:, kept:before] = self._unused_floats(unused)
        self._pages[kept:before] = SCRATCH

    def add_pages(self, added: Sequence[tuple[int, int, int]]) -> None:
        """Add pages to rows: (row, number of the page in the row, page)."""
        row, place, page = to_device(added, torch.int64, self._device).unbind(1)
        self._pages.index_put_((row, place), page.to(torch.int32))

    def _fit_stops(self, widest: int) -> None:
        """Make columns for this many stop tokens."""
        present = len(self._integers) - _STOPS
        if widest > present:
            wider = self._unused_integers(max(widest, 2 * present), self._rows)
            wider[: len(self._integers)] = self._integers
            self._integers, self.generation = wider, self.generation + 1

    def _unused_integers(self, stops: int, rows: int) -> Tensor:
        column = to_device([*_INTEGERS_OF_NONE, *[NO_TOKEN] * stops], torch.int64, self._device)
        return column[:, None].repeat(1, rows)

    def _unused_floats(self, rows: int) -> Tensor:
        return to_device(_FLOATS_OF_NONE, torch.float32, self._device)[:, None].repeat(1, rows)
