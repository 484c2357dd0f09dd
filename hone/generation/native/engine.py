"""The native engine: continuous batching over a Hugging Face module, in the trainer's process.

It reads the parameters that the optimizer updates, so new weights need no transfer. Requests of all callers share one
batch. After each burst of steps the event loop serves callers, pause and abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hone.data.types import StopReason
from hone.errors import GenerationError
from hone.generation import ENGINES
from hone.generation.limits import RequestLimits
from hone.generation.native.rows import CacheLimits
from hone.generation.native.runner import Outcome, Runner
from hone.generation.native.scheduler import Job, Scheduler
from hone.generation.native.speculative import Speculation
from hone.generation.protocol import (
    Completion,
    Engine,
    EngineDescription,
    GenerationRequest,
    incomplete_weights,
    require_weights,
)
from hone.insight import activity
from hone.together import HURRY

BURST = 32
"""Maximum of decode steps before the event loop gets control; bfloat16 copies of the weights live as long."""
WATCHED_BURST = 4
"""The same while a request reports its progress."""


class NativeEngine(Engine):
    """Continuous batching with a KV cache."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        dtype: str,  # compute dtype: float32, bfloat16 or float16
        max_num_seqs: int,
        max_cache_tokens: int | None,  # capacity of the cache; None means max_num_seqs sequences of max_model_len
        max_model_len: int,
        # whether ``model`` is the module that is trained; otherwise :meth:`load_weights` copies
        shares_weights: bool = True,
        gpu_memory_utilization: float = 0.5,  # share of a GPU's memory for weights and KV cache together
        # whether completions have the experts of each token, of a model with routers (:mod:`hone.models.experts`)
        report_experts: bool = False,
        speculation: Speculation | None = None,  # drafts tokens, which the model verifies; None for one token a step
    ) -> None:
        self.model, self.device, self.dtype, self.shares_weights = model, device, dtype, shares_weights
        limits = CacheLimits(max_num_seqs, max_model_len, max_cache_tokens, gpu_memory_utilization)
        self._runner = Runner(
            model,
            tokenizer,
            device=device,
            dtype=dtype,
            limits=limits,
            report_experts=report_experts,
            speculation=speculation,
        )
        self._scheduler = Scheduler(max_num_seqs)
        self._limits = RequestLimits(max_model_len, limits.tokens, self._runner.vocabulary, self._runner.reads_images)
        self._entering: list[Job] = []
        self._arrived: set[str] = set()
        self._incomplete: int | None = None
        self._dropped: list[tuple[nn.Parameter, torch.Size]] = []
        self._paused = False
        self._resumed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        for request in requests:
            self._limits.check(request)
        grammars = [await self._runner.grammars.start(request.sampling) for request in requests]
        if self._incomplete is not None:
            raise incomplete_weights(f"of version {self._incomplete}")
        if not self._scheduler.waiting and not self._runner.running:
            self._release_shared()
        answers: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        jobs = [
            Job.from_request(request, answers, grammar, self._runner.version)
            for request, grammar in zip(requests, grammars, strict=True)
        ]
        self._scheduler.waiting.extend(jobs)
        self._start()
        try:
            for _ in jobs:
                answer = await answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:
            for job in jobs:
                job.aborted = True

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
        """Load weights of a version: copy them, or only note the version if the trainer's parameters are shared.

        Requests under way keep their KV caches; while weights arrive in several calls, the engine has to be paused.
        """
        if not self.shares_weights:
            self._copy(weights, version, last)
        if last:
            self._runner.begin_version(version)

    def forget_incomplete(self) -> None:
        """Require all weights of a version again, after some of them have arrived."""
        self._arrived = set()

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._resumed.set()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        wanted = None if request_ids is None else set(request_ids)
        for job in (*self._scheduler.waiting, *self._runner.running):
            job.aborted = job.aborted or wanted is None or job.request.request_id in wanted
        await asyncio.sleep(0)  # many that are cancelled in one turn leave the cache together
        self._remove_aborted()

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the cache; running requests end as aborted. Without ``keep_weights`` a copy of the weights is dropped."""
        await self.abort()
        self._runner.release()
        self._runner.sleep()
        if keep_weights or self.shares_weights:
            return
        for parameter in self.model.parameters():
            self._dropped.append((parameter, parameter.shape))
            parameter.data = parameter.data.new_empty(0)
        self._incomplete = self._runner.version

    async def wake(self, *, cache: bool = True) -> None:
        """Take the memory of dropped weights back; they must be loaded before the next request. The cache takes memory when a request enters."""
        for parameter, shape in self._dropped:
            parameter.data = parameter.data.new_empty(shape)
        self._dropped = []

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        self._runner.rows.sessions.forget(sessions)

    def describe(self) -> EngineDescription:
        load = {
            "waiting": len(self._scheduler.waiting),
            "cache_tokens": self._runner.rows.cache_tokens,
            "max_cache_tokens": self._runner.rows.max_cache_tokens,
        }
        return EngineDescription(
            "native", self.shares_weights, self.dtype, str(self.device), {**self._runner.stats, **load}
        )

    def _copy(self, weights: Iterable[tuple[str, Tensor]], version: int, last: bool) -> None:
        """Copy weights into the model; requests are refused until all weights have arrived."""
        parameters = dict(self.model.named_parameters())
        arrived = self._arrived if self._incomplete == version else set()
        self._arrived = set()  # an update that fails, or is replaced by another, starts again
        with torch.no_grad():
            for name, tensor in weights:
                self._incomplete = version
                if name not in parameters or parameters[name].shape != tensor.shape:
                    expected = f"has shape {tuple(parameters[name].shape)}" if name in parameters else "does not exist"
                    raise GenerationError(
                        f"weight '{name}' arrived with shape {tuple(tensor.shape)}; in the engine's model it {expected}",
                        why="the engine would sample from a different policy than the trained one",
                        fix="build the engine with the trained architecture",
                    )
                parameters[name].copy_(tensor)
                arrived.add(name)
        if last and self._incomplete is not None:
            require_weights(parameters, parameters.keys() - arrived)
        if last:
            self._incomplete = None
        else:
            self._arrived = arrived

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._resumed = asyncio.Event()
            self._task = loop.create_task(self._serve())

    async def _serve(self) -> None:
        """Decode while there are requests.

        An error of one request is its own answer. An error of a step, which all rows share, is delivered to every caller.
        """
        scheduler, runner = self._scheduler, self._runner
        try:
            while scheduler.waiting or runner.running:
                if self._paused:
                    self._resumed.clear()
                    await self._resumed.wait()
                    continue
                self._remove_aborted()
                self._burst()
                await asyncio.sleep(0)
            self._release_shared()
        except BaseException as error:
            jobs = [*scheduler.waiting, *self._entering, *runner.running, *runner.preempted]
            self._entering = []
            scheduler.waiting.clear()
            for job in jobs:  # first: on a broken device the next line may fail
                job.answer.put_nowait(error)
            runner.clear()
            if not isinstance(error, Exception):
                raise

    def _release_shared(self) -> None:
        """Drop copies of weights that the trainer may change unseen; an engine's own weights change in :meth:`load_weights` alone."""
        if self.shares_weights:
            self._runner.release()

    def _burst(self) -> None:
        scheduler, runner = self._scheduler, self._runner
        jobs = (*runner.running, *scheduler.waiting)
        watched = any(job.request.progress is not None for job in jobs)
        with runner.computing():
            for _ in range(WATCHED_BURST if watched else BURST):
                self._entering = scheduler.admit(len(runner.running), runner.version, runner.rows.admission)
                if self._entering:
                    _deliver(runner.enter(self._entering))
                self._entering = []
                if not runner.running:
                    break
                finished = runner.step()
                _deliver(finished)
                self._put_back()
                activity.tick()
                if HURRY.is_set() or any(job.request.session is not None for job, _ in finished):
                    break  # the episode may continue at once
            _deliver(runner.settle())
        self._report_progress()

    def _put_back(self) -> None:
        if self._runner.preempted:
            self._scheduler.put_back(self._runner.preempted)
            self._runner.preempted = []

    def _report_progress(self) -> None:
        """Call the progress callbacks; a request whose callback fails ends with its error."""
        failed: dict[Job, Exception | None] = {}
        for row, job in enumerate(self._runner.running):
            if job.request.progress is not None:
                try:
                    job.request.progress(*self._runner.so_far(row))
                except Exception as error:  # noqa: BLE001 - the error is the request's answer
                    failed[job] = error
        self._end(failed)

    def _end(self, jobs: Mapping[Job, Exception | None]) -> None:
        _deliver(self._runner.end(jobs))

    def _remove_aborted(self) -> None:
        for job in self._scheduler.remove(lambda job: job.aborted):
            if not job.sampled.tokens:
                job.version = self._runner.version
            job.answer.put_nowait(self._runner.completion(job, job.sampled, StopReason.ABORTED))
        self._end({job: None for job in self._runner.running if job.aborted})


ENGINES.register("native")(NativeEngine)


def _deliver(outcomes: Sequence[tuple[Job, Outcome]]) -> None:
    for job, outcome in outcomes:
        job.answer.put_nowait(outcome)
