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
from hone.generation.native.cache import KeyValueCache, closing_moves, columns, with_spare
from hone.generation.native.forward import FusedForward, ModuleForward
from hone.generation.native.layouts import DecodeLayout, ExtendLayout, PrefillLayout
from hone.generation.native.parked import ParkedTurns, Slabs, Turn
from hone.generation.native.prompts import Prompts, Stacks
from hone.generation.native.sampler import RowSampling, sample
from hone.generation.native.scheduler import Job
from hone.generation.protocol import Completion
from hone.generation.stop_strings import ends_with_stop, window

PREFILL_TOKENS = 16384
"""Most prompt tokens in one forward pass (a longer prompt is a pass of its own)."""
STATS = (
    *("prefill_tokens", "decode_tokens", "steps", "peak_sequences", "peak_cache_tokens"),
    *("prefix_hits", "session_hits", "session_tokens", "cached_tokens"),
)


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
        cache: what each row has of its own: from its prompt's last token on, or all of it.
        prompts: what comes before.
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
        kept = torch.bfloat16 if self.bfloat16 else torch.float32
        self.cache, self.prompts = KeyValueCache(device, kept), Prompts(device, kept)
        self._max_cache_tokens = max_cache_tokens
        self.parked = ParkedTurns(max_cache_tokens)
        self.running: list[Job] = []
        self.version = 0
        causal: Any = getattr(model, "get_base_model", lambda: model)()
        self._forward = (FusedForward if FusedForward.fits(causal) else ModuleForward)(causal, bfloat16=self.bfloat16)
        self._vocabulary = causal.get_input_embeddings().num_embeddings
        self._state: RowState | None = None
        self._sampling: RowSampling | None = None
        self._stacks: Stacks | None = None
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
        """Give each job a row, and its prompt (but for the last token, which the first step feeds) a place in the cache."""
        now = time.perf_counter()
        for job in jobs:
            job.started, job.entered = now, self._steps
        self._fill(jobs)
        requests = [job.request for job in jobs]
        state = RowState.of(requests, [job.begun for job in jobs], self._vocabulary, self.device)
        sampling = RowSampling.of([r.sampling for r in requests], [r.seed for r in requests], self.device)
        self._state = state if self._state is None else self._state.join(state)
        self._sampling = sampling if self._sampling is None else self._sampling.join(sampling)
        self.running += jobs
        self._fresh += jobs
        self._stacks = None
        self.stats["peak_sequences"] = max(self.stats["peak_sequences"], len(self.running))

    def _fill(self, jobs: Sequence[Job]) -> None:
        """Put prompts into the cache; equal ones are computed once, and what an episode's last turn left is not again.

        They go into the rows of the jobs while all are alone, else into slots.
        """
        alone = jobs[0].alone
        if not alone and any(job.alone for job in self.running):
            self._share_prompts()
        held, entering = self.prompts.count, []
        for row, job in enumerate(jobs, len(self.running)):
            if alone:
                entering.append((job, row))
                continue
            job.slot, new = self.prompts.take(job.prompt, self.version, job.shared)
            if new:
                entering.append((job, job.slot))
            else:
                self.stats["prefix_hits"] += 1
                self.stats["cached_tokens"] += job.shared
        self._reserve(self.running, jobs, held)
        cache = self.cache if alone else self.prompts.cache
        fresh: list[tuple[int, list[int]]] = []
        added: list[tuple[int, int, list[int]]] = []
        for job, place in entering:
            ids, kept = job.request.prompt_ids[:-1], self._unpark(job, cache, place)
            if kept == 0 and ids:
                fresh.append((place, ids))
            elif kept < len(ids):
                added.append((place, kept, ids[kept:]))
        self._prefill(cache, fresh)
        self._extend(cache, added)

    def _share_prompts(self) -> None:
        """Move the prompts of the rows, which were alone, to slots: some that enter share theirs."""
        assert self._state is not None
        rows = [self.cache.read_row(row, self._held(job)) for row, job in enumerate(self.running)]
        begun = [job.begun for job in self.running]
        for job in self.running:
            job.alone = False
            job.slot, _ = self.prompts.take(job.prompt, job.version, job.shared)
        self._reserve([], self.running, 0)
        for row, (job, slabs) in enumerate(zip(self.running, rows, strict=True)):
            self.prompts.cache.write_row(job.slot, job.shared, slabs)
            drawn = {layer: (k[:, job.shared :], v[:, job.shared :]) for layer, (k, v) in slabs.items()}
            self.cache.write_row(row, self._drawn(job), drawn)
        self._state = self._state.with_prompts_apart(begun)

    def _reserve(self, held: Sequence[Job], entering: Sequence[Job], slots: int) -> None:
        """Make room in both caches for jobs whose rows hold something and jobs that enter, and beside ``slots`` that do.

        On the CPU rows get room as they grow; elsewhere for all that they may come to hold, so that memory stays whole.
        """
        jobs, limit, prompts = (*held, *entering), self._max_cache_tokens, self.prompts.cache
        most = max(job.own for job in jobs)
        roomy = with_spare(max(self._held(job) for job in jobs) + 1 if self.device.type == "cpu" else most)
        wanted = (len(jobs), min(roomy, most)), (self.prompts.count, self.prompts.longest)
        self.cache.reserve(*wanted[0], used=len(held), roomy=roomy, limit=limit - prompts.tokens)
        prompts.reserve(*wanted[1], used=slots, roomy=self.prompts.longest, limit=limit - self.cache.tokens)
        if self.cache.tokens + prompts.tokens > limit:  # both exactly: the scheduler has seen that this fits
            self.cache.resize(*wanted[0], used=len(held))
            prompts.resize(*wanted[1], used=slots)
        peak = "peak_cache_tokens"
        self.stats[peak] = max(self.stats[peak], self.cache.tokens + prompts.tokens)

    def _fit_rows(self, longest: int) -> None:
        """Give each row room for ``longest`` tokens, and on the CPU little more."""
        capacity = self.cache.capacity
        if longest > capacity:
            self._reserve(self.running, [], self.prompts.count)
            self._stacks = None  # the slots may have moved
        elif self.device.type == "cpu" and columns(longest, capacity) < capacity:
            self.cache.resize(self.cache.rows, with_spare(longest), used=len(self.running))

    def _prefill(self, cache: KeyValueCache, prompts: list[tuple[int, list[int]]]) -> None:
        """Put whole prompts into rows of a cache: (row, tokens)."""
        while prompts:
            count, tokens = 1, len(prompts[0][1])
            while count < len(prompts) and tokens + len(prompts[count][1]) <= PREFILL_TOKENS:
                tokens += len(prompts[count][1])
                count += 1
            chunk, prompts = prompts[:count], prompts[count:]
            lengths = torch.tensor([len(ids) for _, ids in chunk])
            layout = PrefillLayout(cache, torch.tensor([row for row, _ in chunk]), lengths)
            ids = torch.tensor([[token for _, ids in chunk for token in ids]], device=self.device)
            self._forward.hidden(ids, layout)
            self.stats["prefill_tokens"] += tokens

    def _unpark(self, job: Job, cache: KeyValueCache, place: int) -> int:
        """Begin a row of a cache with what the job's session has left; returns how many tokens that is."""
        found = self.parked.find(job.request.session, job.request.prompt_ids, self.version)
        if found is None:
            return 0
        turn, shared = found
        cache.write_row(place, shared, turn.slabs)
        self.stats["session_hits"] += 1
        self.stats["session_tokens"] += shared
        self.stats["cached_tokens"] += shared
        return shared

    def _extend(self, cache: KeyValueCache, added: list[tuple[int, int, list[int]]]) -> None:
        """Put further tokens into rows of a cache: (row, tokens it holds, further ones). Like lengths go together, for they
        share a rectangle.
        """
        added = sorted(added, key=lambda entry: len(entry[2]))
        while added:
            count = 1
            while count < len(added) and (count + 1) * (added[count][1] + len(added[count][2])) <= PREFILL_TOKENS:
                count += 1
            chunk, added = added[:count], added[count:]
            rows, past, parts = zip(*chunk, strict=True)
            lengths = torch.tensor([len(ids) for ids in parts])
            layout = ExtendLayout(cache, torch.tensor(rows), torch.tensor(past), lengths)
            self._forward.hidden(torch.tensor([[token for ids in parts for token in ids]], device=self.device), layout)
            self.stats["prefill_tokens"] += int(lengths.sum())

    def _park(self, job: Job, row: int, tokens: list[int]) -> None:
        """Keep prompt and row for the next turn of the job's session; the last token drawn is not in the cache yet."""
        session = job.request.session
        if session is not None and job.version == self.version:
            ids = [*job.request.prompt_ids, *tokens][:-1]
            slabs = _end_to_end(
                self.prompts.cache.read_row(job.slot, job.shared), self.cache.read_row(row, job.begun + len(tokens))
            )
            self.parked.put(session, Turn(ids, self.version, slabs))

    # one step --------------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Job, Completion]]:
        """Draw one token for every row; returns those that have ended with it, whose rows are free again."""
        state, sampling = self._state, self._sampling
        if state is None or sampling is None:
            return []
        self._fit_rows(int(state.length.max()) + 1)
        if self._stacks is None and not self.running[0].alone:
            self._stacks = Stacks([job.slot for job in self.running], self.prompts)
        layout = DecodeLayout(self.cache, state.length, state.shared, self._stacks)
        logits = self._forward.logits(state.next_token[:, None], layout)
        seen = state.seen if sampling.penalises else None
        drawn = sample(logits[:, -1], sampling, state.generated, seen)
        state.record(*drawn)
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
        ended = stopped | state.full
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
        self.running, self._fresh, self._state, self._sampling, self._stacks = [], [], None, None, None
        self.prompts.clear()

    def sleep(self) -> None:
        """Give the memory of keys and values back; no row may be left."""
        self.cache.clear()
        self.prompts.cache.clear()
        self.parked.clear()

    def _drawn(self, job: Job) -> int:
        """Tokens drawn for it."""
        return self._steps - job.entered

    def _held(self, job: Job) -> int:
        """Tokens in its row of the cache."""
        return job.begun + self._drawn(job)

    def _ends_with_stop_string(self, row: int) -> bool:
        """Whether a stop string of the row lies in its text, completed by the last token."""
        assert self._state is not None
        job = self.running[row]
        stops = job.request.sampling.stop
        drawn = self._drawn(job)
        tail = self._state.tokens[row, max(0, drawn - window(stops)) : drawn].tolist()
        return ends_with_stop(self.tokenizer, tail, stops)

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
        """Move the last rows into the gaps, and so with prompts that nobody continues any more."""
        assert self._state is not None and self._sampling is not None
        if len(gone) == len(self.running):
            self.clear()
            return
        gaps, movers = closing_moves(len(self.running), gone)
        self.cache.copy_rows(movers, gaps, max((self._held(self.running[row]) for row in movers), default=0))
        order = list(range(len(self.running) - len(gone)))
        for gap, mover in zip(gaps, movers, strict=True):
            order[gap] = mover
        moved = self.prompts.leave(self.running[row].slot for row in gone if not self.running[row].alone)
        self.running = [self.running[row] for row in order]
        for job in self.running:
            job.slot = moved.get(job.slot, job.slot)
        index = torch.tensor(order, device=self.device)
        self._state, self._sampling, self._stacks = self._state.select(index), self._sampling.select(index), None


def _end_to_end(first: Slabs, second: Slabs) -> Slabs:
    if not first:
        return second
    return {
        layer: (torch.cat([first[layer][0], keys], 1), torch.cat([first[layer][1], values], 1))
        for layer, (keys, values) in second.items()
    }
