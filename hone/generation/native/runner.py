"""Execution of the batch: prefill on entry, one token a step for each row, and compaction when rows end."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hone.config.limits import PREFILL_TOKENS
from hone.data.types import StopReason
from hone.errors import GenerationError, RequestError
from hone.generation.grammars import Grammars
from hone.generation.native.batch import RowState
from hone.generation.native.cache import KVCache, RowEntries, closing_moves, columns, with_spare
from hone.generation.native.constrained import ConstrainedRows
from hone.generation.native.contexts import DecodeContext, RowExtent
from hone.generation.native.prefill import Prefill
from hone.generation.native.prefixes import PrefixGroups, SharedPrefixes
from hone.generation.native.sampler import RowSampling, likeliest, sample
from hone.generation.native.scheduler import Job
from hone.generation.native.sessions import CachedTurn, SessionCache
from hone.generation.protocol import Alternatives, Completion
from hone.generation.stop_strings import ends_with_stop, window
from hone.models.llama.decode import DecodeForward
from hone.models.llama.spec import supports
from hone.models.module_forward import Forward, ModuleForward
from hone.models.registry import family_of

STATS = (
    *("prefill_tokens", "decode_tokens", "steps", "peak_sequences", "peak_cache_tokens"),
    *("prefix_hits", "session_hits", "session_tokens", "cached_tokens"),
)


Outcome = Completion | GenerationError
"""End of a request: its completion, or why it failed."""


class Runner:
    """Computes tokens for jobs; :class:`NativeEngine` handles callers and scheduling.

    Args:
        model: a causal language model (adapters included) that uses Hone's attention.
        tokenizer: decodes, for stop strings.
        device: where the model is.
        dtype: compute dtype, float32 or bfloat16.
        max_cache_tokens: capacity of the cache; the session KV cache has the same capacity in addition.

    Attributes:
        running: the job of each row.
        cache: the tokens of each row: all of them, or those after a shared prefix.
        prefixes: the shared prefixes.
        per_token: whether the caches of all layers have one entry per token, so that rows can share prefixes.
        sessions: the session KV cache.
        vocabulary: number of tokens with an embedding.
        grammars: compiled constraints.
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
        causal: Any = getattr(model, "get_base_model", lambda: model)()
        config: Any = causal.get_decoder().config
        new_layer = functools.partial(family_of(config.model_type).layer_cache, config)
        self.per_token = all(new_layer(layer).per_token for layer in range(config.num_hidden_layers))
        cache_dtype = torch.bfloat16 if self.bfloat16 else torch.float32
        self.cache = KVCache(device, cache_dtype, new_layer)
        self.prefixes = SharedPrefixes(KVCache(device, cache_dtype, new_layer))
        self._max_cache_tokens = max_cache_tokens
        self.sessions = SessionCache(max_cache_tokens, per_token=self.per_token)
        self.running: list[Job] = []
        self.version = 0
        executor = DecodeForward if supports(causal) else ModuleForward
        self._forward: Forward = executor(causal, bfloat16=self.bfloat16)
        self.stats: dict[str, int] = dict.fromkeys(STATS, 0)
        self._prefill = Prefill(self._forward, self.sessions, self.stats, device=device, max_tokens=PREFILL_TOKENS)
        self.vocabulary: int = causal.get_input_embeddings().num_embeddings
        self.grammars = Grammars(tokenizer, self.vocabulary)
        self._state: RowState | None = None
        self._sampling: RowSampling | None = None
        self._groups: PrefixGroups | None = None
        self._extent_before: RowExtent | None = None  # of the same rows at step 0, as if they had decoded since
        self._steps = 0
        self._fresh: list[Job] = []
        self._constrained = ConstrainedRows(self.grammars, device)
        self._top_log_probs = 0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Put the model in the mode that :meth:`enter` and :meth:`step` need; restore it afterwards."""
        training = self.model.training
        self.model.eval()
        try:
            with self._forward.computing():
                yield
        finally:
            self.model.train(training)

    def release(self) -> None:
        """Drop copies of weights, because the weights have changed or no request is running."""
        self._forward.release()

    def begin_version(self, version: int) -> None:
        """Compute with new weights from now on; running jobs note what the earlier ones sampled."""
        self.release()  # copies of the old weights: a fused optimizer changes weights without a version count
        self.sessions.clear()
        if version != self.version:
            for job in self.running:
                job.earlier.append((self.version, self._num_sampled(job)))
        self.version = version

    # entering --------------------------------------------------------------------------------------------------------

    def enter(self, jobs: Sequence[Job]) -> list[tuple[Job, Outcome]]:
        """Give each job a row and prefill its prompt, without the last token, which is the input of the first step.

        If that fails, the jobs enter one at a time; those that fail alone do not run, and are returned.
        """
        if not jobs[0].in_row and any(job.in_row for job in self.running):
            self._share_prompts()
        now = time.perf_counter()
        for job in jobs:
            job.started, job.entered = now, self._steps
        try:
            state, sampling = self._rows_of(jobs)
        except Exception as error:  # noqa: BLE001 - the error is the request's answer
            self._withdraw(jobs)
            if len(jobs) == 1:
                return [(jobs[0], _failure(jobs[0], error))]
            return [failure for job in jobs for failure in self.enter([job])]
        self._state, self._sampling = state, sampling
        self.running += jobs
        self._fresh += jobs
        self._groups = None
        self._note_rows()
        self.stats["peak_sequences"] = max(self.stats["peak_sequences"], len(self.running))
        return []

    def _rows_of(self, jobs: Sequence[Job]) -> tuple[RowState, RowSampling]:
        """Prefill the prompts of jobs; return state and sampling parameters of all rows with them."""
        self._constrained.begin(jobs)
        self._fill(jobs)
        requests = [job.request for job in jobs]
        state = RowState.from_requests(requests, [job.prompt_in_row for job in jobs], self.vocabulary, self.device)
        sampling = RowSampling.from_params([r.sampling for r in requests], [r.seed for r in requests], self.device)
        if self._state is None or self._sampling is None:
            return state, sampling
        return self._state.join(state), self._sampling.join(sampling)

    def _withdraw(self, jobs: Sequence[Job]) -> None:
        """Undo what :meth:`enter` has done for jobs that did not enter; their slots are the last ones."""
        self.prefixes.release(job.slot for job in jobs if job.slot >= 0)
        for job in jobs:
            job.slot = -1

    def _fill(self, jobs: Sequence[Job]) -> None:
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
                job.slot, new = self.prefixes.take(job.prompt, self.version, job.shared)
                place = job.slot
            if new:
                entering.append((job, place))
            else:
                self.stats["prefix_hits"] += 1
                self.stats["cached_tokens"] += len(job.request.prompt_ids) - 1
        self._reserve(self.running, jobs, used_slots)
        cache = self.cache if in_rows else self.prefixes.cache
        self._prefill.fill(cache, [(job.request, place) for job, place in entering], self.version)
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        self.cache.copy_rows(sources, targets, max((len(job.request.prompt_ids) - 1 for job in jobs), default=0))

    def _share_prompts(self) -> None:
        """Move the prompts of all rows to shared slots, because an entering job shares a prompt."""
        assert self._state is not None
        rows = [self.cache.read_row(row, self._row_tokens(job)) for row, job in enumerate(self.running)]
        moved_tokens = [job.prompt_in_row for job in self.running]
        for job in self.running:
            job.in_row = False
            job.slot, _ = self.prefixes.take(job.prompt, job.version, job.shared)
        self._extent_before = None
        self._reserve([], self.running, 0)
        for row, (job, entries) in enumerate(zip(self.running, rows, strict=True)):
            self.prefixes.cache.write_row(job.slot, job.shared, entries)
            sampled = {layer: tuple(kv[:, job.shared :] for kv in tensors) for layer, tensors in entries.items()}
            self.cache.write_row(row, self._num_sampled(job), sampled)
        self._state = self._state.with_shared_prefixes(moved_tokens)

    def _reserve(self, cached: Sequence[Job], entering: Sequence[Job], slots: int) -> None:
        """Grow both caches for ``cached`` rows, ``entering`` jobs, and the prefixes after ``slots`` used slots.

        On the CPU the capacity grows with the rows. Elsewhere rows get the capacity of their longest possible sequence at once,
        which avoids fragmentation.
        """
        jobs, limit, prefix_cache = (*cached, *entering), self._max_cache_tokens, self.prefixes.cache
        longest = max(job.max_row_tokens for job in jobs)
        generous = with_spare(max(self._row_tokens(job) for job in jobs) + 1 if self.device.type == "cpu" else longest)
        wanted = (len(jobs), min(generous, longest)), (self.prefixes.count, self.prefixes.longest)
        self.cache.reserve(*wanted[0], used=len(cached), generous=generous, limit=limit - prefix_cache.tokens)
        prefix_cache.reserve(*wanted[1], used=slots, generous=self.prefixes.longest, limit=limit - self.cache.tokens)
        if self.cache.tokens + prefix_cache.tokens > limit:  # the exact sizes fit: the scheduler has checked it
            self.cache.resize(*wanted[0], used=len(cached))
            prefix_cache.resize(*wanted[1], used=slots)
        peak = "peak_cache_tokens"
        self.stats[peak] = max(self.stats[peak], self.cache.tokens + prefix_cache.tokens)

    def _fit_rows(self, longest: int) -> None:
        """Set the capacity of rows to at least ``longest`` tokens, and on the CPU little more."""
        capacity = self.cache.capacity
        if longest > capacity:
            self._reserve(self.running, [], self.prefixes.count)
            self._groups = None  # the slots may have moved
        elif self.device.type == "cpu" and columns(longest, capacity) < capacity:
            self.cache.resize(self.cache.rows, with_spare(longest), used=len(self.running))

    def _keep_for_session(self, job: Job, row: int, tokens: list[int]) -> None:
        """Copy prompt and row to the session KV cache; the last sampled token is not in the cache yet."""
        session = job.request.session
        if session is not None and job.version == self.version:
            ids = [*job.request.prompt_ids, *tokens][:-1]
            entries = self.cache.read_row(row, job.prompt_in_row + len(tokens))
            if not job.in_row:
                entries = _concatenated(self.prefixes.cache.read_row(job.slot, job.shared), entries)
            self.sessions.put(session, CachedTurn(ids, self.version, entries))

    # one step --------------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Job, Outcome]]:
        """Sample one token for every row and return the jobs that have ended or failed with it."""
        state, sampling = self._state, self._sampling
        if state is None or sampling is None:
            return []
        extent = self._extent()
        self._fit_rows(extent.longest + 1)
        if self._groups is None and not self.running[0].in_row:
            self._groups = PrefixGroups([job.slot for job in self.running], self.prefixes)
        context = DecodeContext(self.cache, state.length, state.shared, extent, self._groups)
        logits = self._forward.logits(state.next_token[:, None], context)
        logits = logits[:, -1]
        seen, counts = state.seen if sampling.penalises else None, state.counts if sampling.counts else None
        allowed = self._constrained.allowed() if self._constrained else None
        tokens, log_probs, sampling_log_probs = sample(logits, sampling, state.generated, seen, counts, allowed)
        if self._top_log_probs:
            self._keep_alternatives(logits, sampling)
        state.record(tokens, log_probs, sampling_log_probs)
        finite = (log_probs + sampling_log_probs).isfinite()
        self._steps += 1
        if self._fresh:
            now = time.perf_counter()
            for job in self._fresh:
                job.first_token = now
            self._fresh = []
        self.stats["steps"] += 1
        self.stats["decode_tokens"] += len(self.running)
        stopped, failed = state.stopped, self._search_stop_strings(tokens)
        if self._constrained:
            failed = self._constrained.follow(tokens, self._is_full) | failed
        complete = [row for row, error in failed.items() if error is None]
        if complete:
            stopped = stopped.index_fill(0, torch.tensor(complete, device=self.device), True)
        ended = stopped | state.full | ~finite
        if failed:
            ended = ended.index_fill(0, torch.tensor(list(failed), device=self.device), True)
        if not bool(ended.any()):
            return []
        rows = ended.nonzero()[:, 0].tolist()
        errors: dict[int, Exception | None] = {row: _not_finite() for row in (~finite).nonzero()[:, 0].tolist()}
        errors |= {row: error for row, error in failed.items() if error is not None}
        return self._remove(rows, stopped.tolist(), errors)

    def end(self, jobs: Mapping[Job, Exception | None]) -> list[tuple[Job, Outcome]]:
        """End jobs with their error, or without one with the tokens sampled so far."""
        rows = {row: jobs[job] for row, job in enumerate(self.running) if job in jobs}
        if not rows:
            return []
        with self.computing():
            return self._remove(list(rows), None, rows)

    def so_far(self, row: int) -> tuple[list[int], list[float], list[Alternatives]]:
        """Return the tokens sampled for a row, their log-probs, and the alternatives if the request asks for them."""
        assert self._state is not None
        job = self.running[row]
        drawn = self._num_sampled(job)
        tokens, log_probs = self._state.tokens[row, :drawn].tolist(), self._state.log_probs[row, :drawn].tolist()
        return tokens, log_probs, list(job.alternatives)

    def clear(self) -> None:
        """Drop all rows."""
        self.running, self._fresh, self._state, self._sampling, self._groups = [], [], None, None, None
        self._note_rows()
        self.prefixes.clear()

    def sleep(self) -> None:
        """Free the memory of all caches; no row may be running."""
        self.cache.free()
        self.prefixes.cache.free()
        self.sessions.clear()

    def _num_sampled(self, job: Job) -> int:
        """Return the number of tokens sampled for a job."""
        return self._steps - job.entered

    def _is_full(self, job: Job) -> bool:
        """Return whether a job has as many tokens as its request allows."""
        return self._num_sampled(job) >= job.request.sampling.max_tokens

    def _row_tokens(self, job: Job) -> int:
        """Return the number of tokens in a job's row of the cache."""
        return job.prompt_in_row + self._num_sampled(job)

    def _extent(self) -> RowExtent:
        """Return the extent of the rows, from their jobs when rows have entered or left; a step adds one token to each."""
        if self._extent_before is None:
            lengths = [self._row_tokens(job) - self._steps for job in self.running]
            self._extent_before = RowExtent(min(lengths), max(lengths), min(job.shared for job in self.running))
        shortest, longest, least_shared = self._extent_before
        return RowExtent(shortest + self._steps, longest + self._steps, least_shared)

    def _search_stop_strings(self, tokens: Tensor) -> dict[int, Exception | None]:
        """Search the responses for their stop strings, after the sampled ``tokens [A]``; the host waits once for all rows.

        Returns:
            The rows whose token completes a stop string, and those in which the search failed, with the error.
        """
        if not any(job.request.sampling.stop for job in self.running):
            return {}
        ends: dict[int, Exception | None] = {}
        for row, (job, token) in enumerate(zip(self.running, tokens.tolist(), strict=True)):
            if stops := job.request.sampling.stop:
                job.tail = [*job.tail, token][-window(stops) :]
                try:
                    if ends_with_stop(self.tokenizer, job.tail, stops):
                        ends[row] = None
                except Exception as error:  # noqa: BLE001 - the error is the request's answer
                    ends[row] = error
        return ends

    # alternatives ----------------------------------------------------------------------------------------------------

    def _note_rows(self) -> None:
        """Note constraints and alternatives of the rows, and forget their extent, after rows enter or leave."""
        self._extent_before = None
        self._constrained.set_rows(self.running)
        self._top_log_probs = max((job.request.sampling.top_log_probs for job in self.running), default=0)

    def _keep_alternatives(self, logits: Tensor, sampling: RowSampling) -> None:
        """Keep the likeliest tokens of the requests that ask for them."""
        top = [values.tolist() for values in likeliest(logits, sampling, self._top_log_probs)]
        for job, *pairs in zip(self.running, *top, strict=True):
            if number := job.request.sampling.top_log_probs:
                job.alternatives.append(list(zip(*pairs, strict=True))[:number])

    # leaving ---------------------------------------------------------------------------------------------------------

    def _remove(
        self, rows: list[int], stopped: list[bool] | None, errors: Mapping[int, Exception | None]
    ) -> list[tuple[Job, Outcome]]:
        """Remove rows and return their completions, or the errors of those that failed."""
        state = self._state
        assert state is not None
        index = torch.tensor(rows, device=self.device)
        columns = [values[index].tolist() for values in (state.tokens, state.log_probs, state.sampling_log_probs)]
        now = time.perf_counter()
        answers: list[tuple[Job, Outcome]] = []
        for i, row in enumerate(rows):
            job, error = self.running[row], errors.get(row)
            if error is not None:
                answers.append((job, _failure(job, error)))
                continue
            tokens, log_probs, sampling_log_probs = (column[i][: self._num_sampled(job)] for column in columns)
            self._keep_for_session(job, row, tokens)
            if stopped is None:
                reason = StopReason.ABORTED
            else:
                reason = StopReason.STOP if stopped[row] else StopReason.LENGTH
            versions, seconds = (job.version, self.version), now - job.started
            first = job.first_token - job.started if tokens else None
            name = job.request.request_id
            completion = Completion(
                name, tokens, log_probs, sampling_log_probs, reason, versions, seconds, first, job.alternatives
            )
            completion.token_versions = job.token_versions(len(tokens), self.version)
            answers.append((job, completion))
        self._compact(set(rows))
        return answers

    def _compact(self, removed: set[int]) -> None:
        """Move the last rows into the gaps of removed rows, and likewise the slots of unused prefixes."""
        assert self._state is not None and self._sampling is not None
        if len(removed) == len(self.running):
            self.clear()
            return
        gaps, movers = closing_moves(len(self.running), removed)
        self.cache.copy_rows(movers, gaps, max((self._row_tokens(self.running[row]) for row in movers), default=0))
        order = list(range(len(self.running) - len(removed)))
        for gap, mover in zip(gaps, movers, strict=True):
            order[gap] = mover
        moved = self.prefixes.release(self.running[row].slot for row in removed if not self.running[row].in_row)
        self.running = [self.running[row] for row in order]
        for job in self.running:
            job.slot = moved.get(job.slot, job.slot)
        index = torch.tensor(order, device=self.device)
        self._state, self._sampling, self._groups = self._state.select(index), self._sampling.select(index), None
        self._note_rows()


def _failure(job: Job, error: Exception) -> GenerationError:
    """Return the answer to a request that failed in the engine, with the error as its cause."""
    if isinstance(error, RequestError):
        return error
    failure = GenerationError(
        f"request '{job.request.request_id}' failed in the engine: {type(error).__name__}: {error}",
        why="only this request ended; the engine serves the others",
        fix="see the engine's log",
    )
    failure.__cause__ = error
    return failure


def _not_finite() -> Exception:
    return FloatingPointError("the logits are not finite, so no token can be sampled")


def _concatenated(prefix: RowEntries, row: RowEntries) -> RowEntries:
    """Concatenate the entries of a shared prefix (empty if no prompt has entries) and of the row that continues it."""
    if not prefix:
        return row
    return {layer: tuple(torch.cat(pair, 1) for pair in zip(prefix[layer], row[layer], strict=True)) for layer in row}
