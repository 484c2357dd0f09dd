"""Execution of the batch: jobs enter, get one token a step, and leave with their completion or error."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hone.data.types import ExpertIds, StopReason
from hone.errors import GenerationError, RequestError
from hone.generation.grammars import Grammars, RowGrammar
from hone.generation.native.contiguous import ContiguousRows
from hone.generation.native.paged import support
from hone.generation.native.paged.rows import PagedRows
from hone.generation.native.rows import CacheLimits, End, HostWork, LastToken, RowStore
from hone.generation.native.sampler import Allowed, RowSampling, likeliest, never_sampled
from hone.generation.native.scheduler import Job, Sampled
from hone.generation.native.speculative import Speculation
from hone.generation.protocol import Alternatives, Completion
from hone.generation.stop_strings import ends_with_stop, window
from hone.models.images import find_processor
from hone.models.llama.choice import generation_forward
from hone.models.module_forward import Forward, ModuleForward


class ConstrainedRows:
    """Follows the grammars of constrained responses, one token a step, on the device of the logits."""

    def __init__(self, grammars: Grammars, device: torch.device) -> None:
        self._grammars, self._device = grammars, device
        self._rows: list[tuple[int, Job, RowGrammar]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def set_rows(self, running: Sequence[Job]) -> None:
        """Note the constrained rows, after rows have entered or left."""
        self._rows = [(row, job, job.grammar) for row, job in enumerate(running) if job.grammar is not None]

    def begin(self, jobs: Sequence[Job]) -> None:
        """Find the first tokens of constrained responses.

        Raises:
            RequestError: a response would be empty.
        """
        starting = {job: job.grammar for job in jobs if job.grammar is not None}
        errors = self._find_masks(starting)
        errors |= {job: grammar.failure() for job, grammar in starting.items() if grammar.is_complete}
        if errors:
            raise next(iter(errors.values()))

    def allowed(self) -> Allowed:
        masks = torch.stack([mask for _, job, _ in self._rows if (mask := job.mask) is not None])
        rows = torch.tensor([row for row, _, _ in self._rows], device=self._device)
        return Allowed(rows, self._grammars.allowed(masks.to(self._device)))

    def follow(self, tokens: Sequence[Sequence[int]], is_full: Callable[[Job], bool]) -> dict[int, Exception | None]:
        """Append the sampled tokens; return the rows that cannot continue: None where the response is complete, else the error."""
        ends: dict[int, Exception | None] = {}
        continuing: dict[Job, RowGrammar] = {}
        row_of = {job: row for row, job, _ in self._rows}
        for row, job, grammar in self._rows:
            (token,) = tokens[row]
            if token in grammar.stops:
                continue
            try:
                grammar.accept(token)
            except RequestError as error:
                ends[row] = error
                continue
            continuing[job] = grammar
        errors = self._find_masks(continuing)
        for job, grammar in continuing.items():
            if job in errors and not is_full(job):
                ends[row_of[job]] = errors[job]
            elif grammar.is_complete:
                ends[row_of[job]] = None
        return ends

    def _find_masks(self, grammars: dict[Job, RowGrammar]) -> dict[Job, RequestError]:
        if not grammars:
            return {}
        jobs = list(grammars)
        masks, errors = self._grammars.masks(list(grammars.values()))
        for job, mask in zip(jobs, masks, strict=True):
            job.mask = mask
        return {jobs[index]: error for index, error in errors.items()}


STATS = (
    "prefill_tokens", "decode_tokens", "steps", "peak_sequences", "peak_cache_tokens",
    "prefix_hits", "session_hits", "session_tokens", "cached_tokens", "preemptions",
    "drafted_tokens", "accepted_tokens",
)  # fmt: skip


Outcome = Completion | GenerationError
"""End of a request: its completion, or why it failed."""


class Runner:
    """Computes tokens for jobs; :class:`NativeEngine` handles callers and scheduling."""

    def __init__(
        self,
        model: nn.Module,  # a causal language model (adapters included) that uses Hone's attention
        tokenizer: PreTrainedTokenizerBase,  # decodes, for stop strings
        *,
        device: torch.device,
        dtype: str,  # compute dtype: float32, bfloat16 or float16
        limits: CacheLimits,
        report_experts: bool = False,  # whether completions have the experts of each token
        speculation: Speculation | None = None,  # drafts tokens; None for one token a step
    ) -> None:
        self.model, self.tokenizer, self._device = model, tokenizer, device
        compute_dtype: torch.dtype = getattr(torch, dtype)
        causal: Any = getattr(model, "get_base_model", lambda: model)()
        self.vocabulary: int = causal.get_input_embeddings().weight.shape[0]  # number of tokens with an embedding
        self.reads_images = find_processor(causal) is not None  # whether the model reads images
        self.grammars = Grammars(tokenizer, self.vocabulary)  # compiled constraints
        self._outside = never_sampled(tokenizer, self.vocabulary, device)
        self.version = 0  # of the weights
        self._forward: Forward = generation_forward(causal, dtype=compute_dtype)
        self.stats: dict[str, int] = dict.fromkeys(STATS, 0)  # counters since start
        forward = self._forward
        self._report_experts = report_experts and isinstance(forward, ModuleForward) and forward.keep_experts()
        self.rows = self._rows_of(causal, limits, compute_dtype, speculation)  # the running rows and their KV cache
        self.preempted: list[Job] = []  # jobs that lost their row, to be put back into the queue
        self._fresh: list[Job] = []
        self._constrained = ConstrainedRows(self.grammars, device)
        self._work = HostWork()

    def _rows_of(
        self, causal: Any, limits: CacheLimits, dtype: torch.dtype, speculation: Speculation | None
    ) -> RowStore[Any]:
        """Return rows with a paged cache where model and device allow it and nothing is drafted, else rows of one tensor."""
        device = self._device
        reason = "rows of pages have no drafts" if speculation else support.obstacle(causal, device)
        if reason is None:
            sizes = [p.numel() * (p.element_size() + dtype.itemsize) for p in causal.parameters()]
            return PagedRows(
                self._forward,
                support.page_shape(causal, dtype),
                limits,
                weights=sum(sizes),
                vocabulary=self.vocabulary,
                stats=self.stats,
                device=device,
                no_graphs=support.graph_obstacle(causal, device),
                outside=self._outside,
            )
        if device.type != "cpu":
            support.report_contiguous(reason)
        return ContiguousRows(
            self._forward,
            causal.get_decoder().config,
            vocabulary=self.vocabulary,
            stats=self.stats,
            device=device,
            dtype=dtype,
            max_cache_tokens=limits.tokens,
            keeps_experts=self._report_experts,
            processor=find_processor(causal),
            speculation=speculation,
            outside=self._outside,
        )

    @property
    def running(self) -> list[Job]:
        return self.rows.running

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
        self.rows.release()
        self._forward.release()

    def begin_version(self, version: int) -> None:
        """Compute with new weights from now on; running jobs note what the earlier ones sampled."""
        self.release()  # copies of the old weights: a fused optimizer changes weights without a version count
        self.rows.begin_version()
        if version != self.version:
            for job in self.running:
                job.earlier.append((self.version, self.rows.num_sampled(job)))
        self.version = version

    def enter(self, jobs: Sequence[Job]) -> list[tuple[Job, Outcome]]:
        """Give each job a row and prefill its prompt, without the last token, which is the input of the first step.

        If that fails, the jobs enter one at a time; those that fail alone do not run, and are returned.
        """
        self.rows.prepare(jobs)
        now = time.perf_counter()
        for job in jobs:
            job.started = job.started or now  # a job that lost its row has started before
        try:
            self._constrained.begin(jobs)
            self.rows.enter(jobs, self.version)
        except Exception as error:  # noqa: BLE001 - the error is the request's answer
            self.rows.withdraw(jobs)
            if len(jobs) == 1:
                return [(jobs[0], _failure(jobs[0], error))]
            return [failure for job in jobs for failure in self.enter([job])]
        self._fresh += jobs
        self._note_rows()
        self.stats["peak_sequences"] = max(self.stats["peak_sequences"], len(self.running))
        return []

    def step(self) -> list[tuple[Job, Outcome]]:
        """Sample one token for every row and return the jobs that are known to have ended or failed."""
        if not self.running:
            return []
        steps = self.rows.steps
        ends = self.rows.step(self._work)
        if self.rows.preempted:
            self._note_preempted()
        if self._fresh and self.rows.steps != steps:
            now = time.perf_counter()
            for job in self._fresh:
                job.first_token = job.first_token or now
            self._fresh = []
        return self._remove(ends)

    def _note_preempted(self) -> None:
        """Note the jobs that lost their row, and the version of the weights that sampled their last token."""
        for job in self.rows.preempted:
            job.version = self.version
        self.preempted, self.rows.preempted = [*self.preempted, *self.rows.preempted], []
        self._note_rows()

    def end(self, jobs: Mapping[Job, Exception | None]) -> list[tuple[Job, Outcome]]:
        """End jobs with their error, or without one with the tokens sampled so far."""
        if not any(job in jobs for job in self.running):
            return []
        with self.computing():
            ends = [End(row, StopReason.ABORTED, jobs[job]) for row, job in enumerate(self.running) if job in jobs]
            return self._remove(ends)

    def settle(self) -> list[tuple[Job, Outcome]]:
        """Wait for all tokens sampled so far and return the jobs that have ended with them."""
        return self._remove(self.rows.settle())

    def so_far(self, row: int) -> tuple[list[int], list[float], list[Alternatives]]:
        """Return the tokens sampled for a row, their log-probs, and the alternatives if the request asks for them."""
        (sampled,) = self.rows.sampled([row])
        return sampled.tokens, sampled.log_probs, list(self.running[row].alternatives)

    def clear(self) -> None:
        """Drop all rows."""
        self._fresh, self.preempted = [], []
        self.rows.clear()
        self._note_rows()

    def sleep(self) -> None:
        """Free the memory of all caches; no row may be running."""
        self.rows.free()

    # work of the host ------------------------------------------------------------------------------------------------

    def _note_rows(self) -> None:
        """Note what the host does for the rows in every step, after rows enter or leave."""
        self._constrained.set_rows(self.running)
        stops = any(job.request.sampling.stop for job in self.running)
        alternatives = any(job.request.sampling.top_log_probs for job in self.running)
        supports = any(job.request.sampling.wants_support for job in self.running)
        constrained = bool(self._constrained)
        self._work = HostWork(
            allowed=self._constrained.allowed if constrained else None,
            keep_alternatives=self._keep_alternatives if alternatives else None,
            keep_support=self._keep_support if supports else None,
            follow=self._follow if constrained or stops else None,
        )

    def _follow(self, tokens: Sequence[Sequence[int]]) -> dict[int, LastToken]:
        """Follow stop strings and constraints with the sampled tokens of each row; return the rows that end."""
        ends = self._search_stop_strings(tokens)
        if not self._constrained:
            return ends
        constrained = self._constrained.follow(tokens, self._is_full)
        return {row: LastToken(1, error) for row, error in constrained.items()} | ends

    def _is_full(self, job: Job) -> bool:
        return self.rows.num_sampled(job) >= job.request.sampling.max_tokens

    def _search_stop_strings(self, tokens: Sequence[Sequence[int]]) -> dict[int, LastToken]:
        """Search the responses for their stop strings, after the sampled tokens of each row; return the rows that end or fail."""
        ends: dict[int, LastToken] = {}
        for row, (job, sampled) in enumerate(zip(self.running, tokens, strict=True)):
            stops = job.request.sampling.stop
            for count, token in enumerate(sampled if stops else (), 1):
                job.tail = [*job.tail, token][-window(stops) :]
                try:
                    if not ends_with_stop(self.tokenizer, job.tail, stops):
                        continue
                    ends[row] = LastToken(count)
                except Exception as error:  # noqa: BLE001 - the error is the request's answer
                    ends[row] = LastToken(count, error)
                break
        return ends

    def _keep_alternatives(self, rows: Sequence[int], logits: Tensor, sampling: RowSampling) -> None:
        most = max(job.request.sampling.top_log_probs for job in self.running)
        top = [values.tolist() for values in likeliest(logits, sampling, most)]
        for row, *pairs in zip(rows, *top, strict=True):
            job = self.running[row]
            if number := job.request.sampling.top_log_probs:
                job.alternatives.append(list(zip(*pairs, strict=True))[:number])

    def _keep_support(self, rows: Sequence[int], support: Tensor) -> None:
        """Keep the support ``[N, V]`` of the tokens of the requests that ask for it."""
        sizes = support.sum(-1).tolist()
        ids = iter(support.nonzero()[:, 1].split(sizes))
        for row, size, tokens in zip(rows, sizes, ids, strict=True):
            job = self.running[row]
            if job.request.sampling.wants_support:
                job.support_sizes.append(size)
                job.support_ids += tokens.tolist()

    # leaving ---------------------------------------------------------------------------------------------------------

    def completion(self, job: Job, sampled: Sampled, reason: StopReason, expert_ids: ExpertIds = ()) -> Completion:
        """Return the completion of a job that ends now with these tokens."""
        first_version = job.earlier[0][0] if job.earlier else job.version
        seconds = time.perf_counter() - job.started if job.started else 0.0
        first = job.first_token - job.started if sampled.tokens else None
        versions, name = (first_version, self.version), job.request.request_id
        completion = Completion(name, *sampled, reason, versions, seconds, first, job.alternatives)
        completion.token_versions = job.token_versions(len(sampled.tokens), self.version)
        completion.support_sizes, completion.support_ids = job.support_sizes, job.support_ids
        completion.expert_ids = expert_ids
        return completion

    def _remove(self, ends: Sequence[End]) -> list[tuple[Job, Outcome]]:
        if not ends:
            return []
        answers: list[tuple[Job, Outcome]] = []
        for end, sampled in zip(ends, self.rows.sampled([end.row for end in ends]), strict=True):
            job = self.running[end.row]
            if end.error is not None:
                answers.append((job, _failure(job, end.error)))
                continue
            if job.version == self.version:
                self.rows.keep_for_session(end.row, sampled.tokens, self.version)
            answers.append((job, self.completion(job, sampled, end.reason, self.rows.experts(end.row))))
        self.rows.remove({end.row for end in ends})
        self._note_rows()
        return answers


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
