"""The rows being decoded: prompts go into the cache, every step gives each row one token, ended rows leave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from hone.data.types import StopReason
from hone.generation.native.batch import RowState
from hone.generation.native.cache import KeyValueCache
from hone.generation.native.forward import FusedForward, ModuleForward
from hone.generation.native.layouts import DecodeLayout, ExtendLayout, PrefillLayout
from hone.generation.native.parked import ParkedTurns, Turn
from hone.generation.native.sampler import RowSampling, sample
from hone.generation.native.scheduler import Job
from hone.generation.protocol import Completion

PREFILL_TOKENS = 16384
"""Most prompt tokens in one forward pass (a longer prompt is a pass of its own)."""
STATS = (
    *("prefill_tokens", "decode_tokens", "steps", "peak_sequences", "peak_cache_tokens"),
    *("prefix_hits", "session_hits", "session_tokens", "cached_tokens"),
)
_ROUNDING = 32
_STOP_MARGIN = 4
"""Tokens decoded before a stop string, because some tokenizers treat the first token of a text differently."""


class Runner:
    """Computes; knows nothing of callers.

    Args:
        model: a causal language model (adapters included) that uses Hone's attention.
        tokenizer: decodes, for stop strings.
        device: where the model is.
        dtype: compute dtype, float32 or bfloat16.
        max_cache_tokens: capacity of the cache; between the turns of an episode as many tokens are kept beside it.

    Attributes:
        running: the job of each row.
        parked: what ended turns left for the next ones.
        version: of the weights.
        stats: counters since start.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        dtype: str,
        max_cache_tokens: int,
    ) -> None:
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.bfloat16 = dtype == "bfloat16"
        self.cache = KeyValueCache(device, torch.bfloat16 if self.bfloat16 else torch.float32, max_cache_tokens)
        self.parked = ParkedTurns(max_cache_tokens)
        self.running: list[Job] = []
        self.version = 0
        causal: Any = getattr(model, "get_base_model", lambda: model)()
        self._forward = (FusedForward if FusedForward.fits(causal) else ModuleForward)(causal, bfloat16=self.bfloat16)
        self._vocabulary = causal.get_input_embeddings().num_embeddings
        self._state: RowState | None = None
        self._sampling: RowSampling | None = None
        self._steps = 0
        self._fresh: list[Job] = []
        self.stats: dict[str, int] = dict.fromkeys(STATS, 0)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """The mode in which :meth:`enter` and :meth:`step` run; the model is as before afterwards."""
        training = self.model.training
        self.model.eval()
        try:
            with self._forward.computing():
                yield
        finally:
            self.model.train(training)

    def release(self) -> None:
        """Keep no copies of weights: they have changed, or nothing is being served."""
        self._forward.release()

    # entering --------------------------------------------------------------------------------------------------------

    def enter(self, jobs: Sequence[Job]) -> None:
        """Give each job a row, its prompt (but for the last token, which the first step feeds) in the cache."""
        now, first = time.perf_counter(), len(self.running)
        for job in jobs:
            job.version, job.started, job.entered = self.version, now, self._steps
        capacity = max(job.need for job in (*self.running, *jobs))
        self.cache.reserve(first + len(jobs), capacity, used=first, rounding=_ROUNDING)
        self._fill(jobs, first)
        requests = [job.request for job in jobs]
        state = RowState.of(requests, self._vocabulary, self.device)
        sampling = RowSampling.of([r.sampling for r in requests], [r.seed for r in requests], self.device)
        self._state = state if self._state is None else self._state.join(state)
        self._sampling = sampling if self._sampling is None else self._sampling.join(sampling)
        self.running += jobs
        self._fresh += jobs
        stats = self.stats
        stats["peak_sequences"] = max(stats["peak_sequences"], len(self.running))
        stats["peak_cache_tokens"] = max(stats["peak_cache_tokens"], self.cache.tokens)

    def _fill(self, jobs: Sequence[Job], first: int) -> None:
        """Put prompts into rows ``first``, ``first + 1``, ...; equal prompts are computed once and copied, and what an
        episode's last turn left is not computed again.
        """
        rows = {job.prompt: row for row, job in enumerate(self.running) if job.version == self.version}
        fresh: list[tuple[int, list[int]]] = []
        added: list[tuple[int, int, list[int]]] = []
        copies: dict[int, list[tuple[int, int]]] = {}
        for row, job in enumerate(jobs, start=first):
            source = rows.setdefault(job.prompt, row)
            ids = job.request.prompt_ids[:-1]
            if source != row:
                copies.setdefault(len(ids), []).append((source, row))
                self.stats["prefix_hits"] += 1
                self.stats["cached_tokens"] += len(ids)
            elif ids:
                kept = self._unpark(job, row)
                if not kept:
                    fresh.append((row, ids))
                elif kept < len(ids):
                    added.append((row, kept, ids[kept:]))
        self._prefill(fresh)
        self._extend(added)
        for length, pairs in copies.items():
            sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
            self.cache.copy_rows(sources, targets, length)

    def _prefill(self, prompts: list[tuple[int, list[int]]]) -> None:
        while prompts:
            count, tokens = 1, len(prompts[0][1])
            while count < len(prompts) and tokens + len(prompts[count][1]) <= PREFILL_TOKENS:
                tokens += len(prompts[count][1])
                count += 1
            chunk, prompts = prompts[:count], prompts[count:]
            lengths = torch.tensor([len(ids) for _, ids in chunk])
            layout = PrefillLayout(self.cache, torch.tensor([row for row, _ in chunk]), lengths)
            ids = torch.tensor([[token for _, ids in chunk for token in ids]], device=self.device)
            self._forward.hidden(ids, layout)
            self.stats["prefill_tokens"] += tokens

    def _unpark(self, job: Job, row: int) -> int:
        """Begin the row with what the job's session has left; returns how many tokens that is."""
        found = self.parked.find(job.request.session, job.request.prompt_ids, self.version)
        if found is None:
            return 0
        turn, shared = found
        self.cache.write_row(row, shared, turn.slabs)
        self.stats["session_hits"] += 1
        self.stats["session_tokens"] += shared
        self.stats["cached_tokens"] += shared
        return shared

    def _extend(self, added: list[tuple[int, int, list[int]]]) -> None:
        """Put further tokens into rows: (row, tokens it holds, further ones). Like lengths go together, for they share a
        rectangle.
        """
        added = sorted(added, key=lambda entry: len(entry[2]))
        while added:
            count = 1
            while count < len(added) and (count + 1) * (added[count][1] + len(added[count][2])) <= PREFILL_TOKENS:
                count += 1
            chunk, added = added[:count], added[count:]
            rows, past, parts = zip(*chunk, strict=True)
            lengths = torch.tensor([len(ids) for ids in parts])
            layout = ExtendLayout(self.cache, torch.tensor(rows), torch.tensor(past), lengths)
            self._forward.hidden(torch.tensor([[token for ids in parts for token in ids]], device=self.device), layout)
            self.stats["prefill_tokens"] += int(lengths.sum())

    def _park(self, job: Job, row: int, tokens: list[int]) -> None:
        """Keep what the row holds for the next turn of its session; the last token drawn is not in the cache yet."""
        session = job.request.session
        if session is not None and job.version == self.version:
            ids = [*job.request.prompt_ids, *tokens][:-1]
            self.parked.put(session, Turn(ids, self.version, self.cache.read_row(row, len(ids))))

    # one step --------------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Job, Completion]]:
        """Draw one token for every row; returns those that have ended with it, whose rows are free again."""
        state, sampling = self._state, self._sampling
        if state is None or sampling is None:
            return []
        layout = DecodeLayout(self.cache, state.length, self._longest())
        logits = self._forward.logits(state.next_token[:, None], layout)
        seen = state.seen if sampling.penalises else None
        drawn = sample(logits[:, -1], sampling, state.generated, seen)
        ended = state.record(*drawn)
        self._steps += 1
        if self._fresh:
            now = time.perf_counter()
            for job in self._fresh:
                job.first_token = now
            self._fresh = []
        self.stats["steps"] += 1
        self.stats["decode_tokens"] += len(self.running)
        stopped = state.stopped
        strings = [row for row, job in enumerate(self.running) if job.request.sampling.stop]
        found = [row for row in strings if self._ends_with_stop_string(row)]
        if found:
            stopped = stopped.index_fill(0, torch.tensor(found, device=self.device), True)
            ended = ended | stopped
        if not bool(ended.any()):
            return []
        return self._leave(ended.nonzero()[:, 0].tolist(), stopped.tolist())

    def abort(self, jobs: set[Job]) -> list[tuple[Job, Completion]]:
        """End these jobs with what they have."""
        rows = [row for row, job in enumerate(self.running) if job in jobs]
        if not rows:
            return []
        with self.computing():
            return self._leave(rows, None)

    def so_far(self, row: int) -> tuple[list[int], list[float]]:
        """Tokens drawn for a row and their log-probs."""
        assert self._state is not None
        drawn = self._drawn(self.running[row])
        return self._state.tokens[row, :drawn].tolist(), self._state.log_probs[row, :drawn].tolist()

    def clear(self) -> None:
        """Forget all rows."""
        self.running, self._fresh, self._state, self._sampling = [], [], None, None

    def _longest(self) -> int:
        """Tokens of the longest row, the new one included; known without asking the device."""
        return max(len(job.request.prompt_ids) + self._drawn(job) for job in self.running)

    def _drawn(self, job: Job) -> int:
        return self._steps - job.entered

    def _ends_with_stop_string(self, row: int) -> bool:
        """Whether a stop string of the row lies in its text, completed by the last token.

        A stop string of b bytes lies within the last b tokens, for a token holds a byte at least.
        """
        assert self._state is not None
        job = self.running[row]
        stops = job.request.sampling.stop
        drawn = self._drawn(job)
        window = max(len(stop.encode()) for stop in stops) + _STOP_MARGIN
        tail = self._state.tokens[row, max(0, drawn - window) : drawn].tolist()
        text = str(self.tokenizer.decode(tail))
        return any(stop in text for stop in stops)

    # leaving ---------------------------------------------------------------------------------------------------------

    def _leave(self, rows: list[int], stopped: list[bool] | None) -> list[tuple[Job, Completion]]:
        """Completions of these rows, which are closed up."""
        state = self._state
        assert state is not None
        index = torch.tensor(rows, device=self.device)
        columns = [values[index].tolist() for values in (state.tokens, state.log_probs, state.sampling_log_probs)]
        now = time.perf_counter()
        answers = []
        for i, row in enumerate(rows):
            job = self.running[row]
            tokens, log_probs, sampling_log_probs = (column[i][: self._drawn(job)] for column in columns)
            self._park(job, row, tokens)
            if stopped is None:
                reason = StopReason.ABORTED
            else:
                reason = StopReason.STOP if stopped[row] else StopReason.LENGTH
            versions, seconds = (job.version, self.version), now - job.started
            first = job.first_token - job.started if tokens else None
            name = job.request.request_id
            completion = Completion(name, tokens, log_probs, sampling_log_probs, reason, versions, seconds, first)
            answers.append((job, completion))
        self._close_up(set(rows))
        return answers

    def _close_up(self, gone: set[int]) -> None:
        """Move the last rows into the gaps."""
        assert self._state is not None and self._sampling is not None
        count = len(self.running) - len(gone)
        if count == 0:
            self.clear()
            return
        gaps = sorted(row for row in gone if row < count)
        movers = [row for row in range(count, len(self.running)) if row not in gone]
        order = list(range(count))
        for gap, mover in zip(gaps, movers, strict=True):
            order[gap] = mover
        index = torch.tensor(order, device=self.device)
        if gaps:
            held = max(len(self.running[row].request.prompt_ids) + self._drawn(self.running[row]) for row in movers)
            sources, targets = torch.tensor([movers, gaps], device=self.device).unbind()
            self.cache.copy_rows(sources, targets, held)
        self.running = [self.running[row] for row in order]
        self._state, self._sampling = self._state.select(index), self._sampling.select(index)
