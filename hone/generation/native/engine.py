"""The native engine: continuous batching over a Hugging Face module, in the trainer's process.

It reads the very parameters that the optimizer updates, so new weights need no transfer. All requests, of however many
callers, share one batch; a burst of steps runs without interruption, then callers, pause and abort get their turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hone.data.types import StopReason
from hone.errors import GenerationError
from hone.generation.native.batch import RowState, join_sampling, select_sampling
from hone.generation.native.cache import KeyValueCache
from hone.generation.native.layouts import DecodeLayout, PrefillLayout
from hone.generation.native.sampler import RowSampling, sample
from hone.generation.protocol import Completion, EngineDescription, GenerationRequest

BURST = 16
"""Decode steps between two looks at callers."""
PREFILL_TOKENS = 16384
"""Most prompt tokens in one forward pass."""
_ROUND = 32
"""Row capacities are multiples of this, so that they rarely change."""


@dataclass
class _Job:
    """A request on its way: who waits for it, and when and with which weights it began."""

    request: GenerationRequest
    answer: asyncio.Queue[Completion | BaseException]
    version: int = 0
    started: float = 0.0
    aborted: bool = False

    @property
    def need(self) -> int:
        """Cache tokens it may come to hold."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


class NativeEngine:
    """Continuous batching with a key-value cache.

    Args:
        model: a causal language model (adapters included) that uses Hone's attention.
        tokenizer: decodes, for stop strings.
        device: where the model is.
        dtype: compute dtype, float32 or bfloat16.
        max_num_seqs: most rows decoded at once.
        max_cache_tokens: capacity of the cache; None means max_num_seqs rows of max_model_len.
        max_model_len: longest prompt with response.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        dtype: str,
        max_num_seqs: int,
        max_cache_tokens: int | None,
        max_model_len: int,
    ) -> None:
        self.model, self.tokenizer, self.device, self.dtype = model, tokenizer, device, dtype
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.max_cache_tokens = max_cache_tokens or max_num_seqs * max_model_len
        self._cache = KeyValueCache(device, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        self._waiting: deque[_Job] = deque()
        self._active: list[_Job] = []
        self._state: RowState | None = None
        self._sampling: RowSampling | None = None
        self._version = 0
        self._paused = False
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        causal = getattr(model, "get_base_model", lambda: model)()
        self._decoder, self._config = causal.get_decoder(), causal.config
        self._stats = dict.fromkeys(("prefill_tokens", "decode_tokens", "steps", "shared_prompts", "peak_rows"), 0)

    # the protocol ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        """Serve the requests, yielding each completion as it finishes.

        Raises:
            GenerationError: a request can never be served.
        """
        for request in requests:
            self._check(request)
        answers: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        jobs = [_Job(request, answers) for request in requests]
        self._waiting.extend(jobs)
        self._start()
        try:
            for _ in jobs:
                answer = await answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:  # the caller went away: nobody waits for the rest
            for job in jobs:
                job.aborted = True

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Note the version; the weights are the trainer's own and have changed in place already."""
        del weights
        self._version = version

    async def pause(self) -> None:
        """Stop decoding; requests stay where they are."""
        self._paused = True

    async def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._wake.set()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the given requests (all when None) with the tokens they have."""
        wanted = None if request_ids is None else set(request_ids)
        for job in (*self._waiting, *self._active):
            job.aborted = job.aborted or wanted is None or job.request.request_id in wanted
        self._remove_aborted()

    async def sleep(self) -> None:
        """Give the cache's memory back; requests under way are ended as aborted."""
        await self.abort()
        self._cache.clear()

    async def wake(self) -> None:
        """Nothing to do: the cache grows again when it is needed."""

    def describe(self) -> EngineDescription:
        """What it is, and its counters since start."""
        return EngineDescription("native", True, self.dtype, str(self.device), dict(self._stats))

    # scheduling ------------------------------------------------------------------------------------------------------

    def _check(self, request: GenerationRequest) -> None:
        prompt, need = len(request.prompt_ids), len(request.prompt_ids) + request.sampling.max_tokens
        if prompt == 0 or request.sampling.max_tokens < 1:
            raise GenerationError(
                f"request '{request.request_id}' has {prompt} prompt tokens and asks for {request.sampling.max_tokens}",
                fix="give at least one prompt token and max_tokens of at least 1",
            )
        if need > self.max_cache_tokens:
            raise GenerationError(
                f"request '{request.request_id}' needs {need} cache tokens ({prompt} prompt + "
                f"{request.sampling.max_tokens} response), the cache holds {self.max_cache_tokens}",
                why="it would wait for ever",
                fix=f"actor_rollout_ref.rollout.max_cache_tokens={need} or more, or shorter responses",
            )

    def _start(self) -> None:
        if self._runner is None or self._runner.done() or self._runner.get_loop() is not asyncio.get_running_loop():
            self._wake = asyncio.Event()
            self._runner = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting or self._active:
                if self._paused:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                self._remove_aborted()
                self._burst()
                await asyncio.sleep(0)
        except BaseException as error:
            for job in (*self._waiting, *self._active):
                job.answer.put_nowait(error)
            self._waiting.clear()
            self._keep(torch.zeros(len(self._active), dtype=torch.bool))
            raise

    def _burst(self) -> None:
        training = self.model.training
        self.model.eval()
        bfloat16 = self.dtype == "bfloat16"
        with torch.no_grad(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            for _ in range(BURST):
                self._admit()
                if not self._active:
                    break
                self._step()
        self.model.train(training)

    def _admit(self) -> None:
        """Let waiting requests in, as many as rows and cache allow; prompts that are not in the cache yet are prefilled."""
        if not self._waiting or len(self._active) >= self.max_num_seqs:
            return
        entering: list[_Job] = []
        capacity = max((job.need for job in self._active), default=0)
        while self._waiting and len(self._active) + len(entering) < self.max_num_seqs:
            wider = max(capacity, self._waiting[0].need)
            if (len(self._active) + len(entering) + 1) * wider > self.max_cache_tokens:
                break
            capacity = wider
            entering.append(self._waiting.popleft())
        if not entering:
            return
        now = time.perf_counter()
        for job in entering:
            job.version, job.started = self._version, now
        first = len(self._active)
        rounded = min(-(-capacity // _ROUND) * _ROUND, self.max_cache_tokens)
        rows = first + len(entering)
        self._cache.reserve(rows, rounded if rows * rounded <= self.max_cache_tokens else capacity)
        self._fill(entering, first)
        self._enter(entering)

    def _enter(self, jobs: list[_Job]) -> None:
        vocabulary = self.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        requests = [job.request for job in jobs]
        state = RowState.of(requests, vocabulary, self.device)
        sampling = RowSampling.of([r.sampling for r in requests], [r.seed for r in requests], self.device)
        self._state = state if self._state is None else self._state.join(state)
        self._sampling = sampling if self._sampling is None else join_sampling(self._sampling, sampling)
        self._active += jobs
        self._stats["peak_rows"] = max(self._stats["peak_rows"], len(self._active))

    def _fill(self, jobs: list[_Job], first: int) -> None:
        """Put the prompts, all but their last token, into cache rows ``first``, ``first + 1``, ...

        Equal prompts are computed once: the row of the first is copied to the others.
        """
        where: dict[tuple[int, ...], int] = {}
        for row, job in enumerate(self._active):
            if job.version == self._version:
                where.setdefault(tuple(job.request.prompt_ids), row)
        computed: list[int] = []
        copies: dict[int, list[int]] = {}
        for row, job in enumerate(jobs, start=first):
            source = where.setdefault(tuple(job.request.prompt_ids), row)
            if source == row:
                computed.append(row)
            else:
                copies.setdefault(source, []).append(row)
                self._stats["shared_prompts"] += 1
        prompts = {row: jobs[row - first].request.prompt_ids[:-1] for row in computed}
        self._prefill({row: ids for row, ids in prompts.items() if ids})
        by_row = [*self._active, *jobs]
        for source, targets in copies.items():
            length = len(by_row[source].request.prompt_ids) - 1
            self._cache.copy_row(source, torch.tensor(targets, device=self.device), length)

    def _prefill(self, prompts: dict[int, list[int]]) -> None:
        chunk: dict[int, list[int]] = {}
        for row, ids in prompts.items():
            if chunk and sum(map(len, chunk.values())) + len(ids) > PREFILL_TOKENS:
                self._prefill_chunk(chunk)
                chunk = {}
            chunk[row] = ids
        if chunk:
            self._prefill_chunk(chunk)

    def _prefill_chunk(self, prompts: dict[int, list[int]]) -> None:
        lengths = torch.tensor([len(ids) for ids in prompts.values()])
        layout = PrefillLayout(self._cache, torch.tensor(list(prompts)), lengths, self.device)
        ids = torch.tensor([token for prompt in prompts.values() for token in prompt], device=self.device)
        self._hidden(ids[None], layout)
        self._stats["prefill_tokens"] += len(ids)

    # one step --------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        state, sampling = self._state, self._sampling
        assert state is not None and sampling is not None
        layout = DecodeLayout(self._cache, state.length, int(state.length.max()) + 1)
        hidden = self._hidden(state.next_token[:, None], layout)
        logits = self.model.get_output_embeddings()(hidden[:, -1])  # type: ignore[operator]
        softcap = getattr(self._config, "final_logit_softcapping", None)
        if softcap is not None:
            logits = torch.tanh(logits.float() / softcap) * softcap
        seen = state.seen if state.seen.shape[1] else None
        tokens, log_probs, sampling_log_probs = sample(logits, sampling, state.generated, seen)
        ended = state.record(tokens, log_probs, sampling_log_probs)
        self._stats["steps"] += 1
        self._stats["decode_tokens"] += len(self._active)
        if any(job.request.sampling.stop for job in self._active):
            ended = ended | self._stop_strings(state)
        if bool(ended.any()):
            self._finish(ended)

    def _hidden(self, input_ids: Tensor, layout: PrefillLayout | DecodeLayout) -> Tensor:
        return self._decoder(
            input_ids=input_ids, position_ids=layout.position_ids, layout=layout, use_cache=False
        ).last_hidden_state

    def _stop_strings(self, state: RowState) -> Tensor:
        """Which rows have just completed a stop string."""
        found = torch.zeros(len(self._active), dtype=torch.bool)
        for row, job in enumerate(self._active):
            if stops := job.request.sampling.stop:
                drawn = int(state.generated[row])
                # a stop string of c characters lies within the last c tokens, and one more for a split character
                tail = state.tokens[row, max(0, drawn - max(map(len, stops)) - 1) : drawn].tolist()
                text = self.tokenizer.decode(tail)
                found[row] = any(stop in text for stop in stops)
        return found.to(self.device)

    def _finish(self, ended: Tensor) -> None:
        """Answer the rows that have ended, and close the gaps that they leave."""
        state = self._state
        assert state is not None
        stopped = state.stopped
        if any(job.request.sampling.stop for job in self._active):
            stopped = stopped | self._stop_strings(state)
        rows = ended.nonzero()[:, 0].tolist()
        stops = stopped.tolist()
        for row in rows:
            self._answer(row, StopReason.STOP if stops[row] else StopReason.LENGTH)
        self._keep(~ended)

    def _answer(self, row: int, reason: StopReason) -> None:
        state, job = self._state, self._active[row]
        assert state is not None
        drawn = int(state.generated[row])
        job.answer.put_nowait(
            Completion(
                job.request.request_id,
                state.tokens[row, :drawn].tolist(),
                state.log_probs[row, :drawn].tolist(),
                state.sampling_log_probs[row, :drawn].tolist(),
                reason,
                (job.version, self._version),
                time.perf_counter() - job.started,
            )
        )

    def _keep(self, kept: Tensor) -> None:
        """Keep these rows; the last ones move into the gaps of the others."""
        count = int(kept.sum())
        if count == 0 or self._state is None or self._sampling is None:
            self._active, self._state, self._sampling = [], None, None
            return
        order = torch.arange(count)
        gaps = (~kept[:count]).nonzero()[:, 0].cpu()
        movers = kept[count:].nonzero()[:, 0].cpu() + count
        order[gaps] = movers
        lengths = self._state.length.tolist()
        for gap, mover in zip(gaps.tolist(), movers.tolist(), strict=True):
            self._cache.copy_row(mover, torch.tensor([gap], device=self.device), lengths[mover])
        self._active = [self._active[row] for row in order.tolist()]
        self._state = self._state.select(order.to(self.device))
        self._sampling = select_sampling(self._sampling, order.to(self.device))

    def _remove_aborted(self) -> None:
        for job in [job for job in self._waiting if job.aborted]:
            self._waiting.remove(job)
            answer = Completion(job.request.request_id, [], [], [], StopReason.ABORTED, (self._version,) * 2)
            job.answer.put_nowait(answer)
        aborted = torch.tensor([job.aborted for job in self._active], dtype=torch.bool)
        if bool(aborted.any()):
            for row in aborted.nonzero()[:, 0].tolist():
                self._answer(row, StopReason.ABORTED)
            self._keep(~aborted.to(self.device))
