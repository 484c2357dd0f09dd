"""TensorRT-LLM behind Hone's server. Runs in TensorRT-LLM's own environment, on NVIDIA GPUs.

Written after the published interface of TensorRT-LLM 1.4.0rc1, and held against it by tests; it was never run. It uses what is
documented for reinforcement learning (``AsyncLLM``, ``collective_rpc``, ``WorkerExtension.update_weights``), and nothing of the
engine's inside.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hone.data.types import StopReason
from hone.errors import ConfigError, GenerationError
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.generation.server.arguments import check_names, check_owned, first_lines, refused
from hone.generation.server.backend import Settings
from hone.generation.server.processes import give_up
from hone.generation.server.weight_names import Arrivals
from hone.generation.stop_strings import first_end

EXTENSION = "hone.generation.server.trtllm_worker.HoneWorker"
ENVIRONMENT = {
    "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",  # not the trainer's Ray
    "TLLM_DISABLE_MPI": "1",
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # weights are copied on one stream, in their order
    "TRTLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of TensorRT-LLM that are set where the user has not."""
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
_OWNED = {
    "backend": "only its PyTorch backend takes new weights",
    "orchestrator_type": "only with Ray it takes new weights",
    "ray_worker_extension_cls": "Hone's part in the worker takes new weights",
    "speculative_config": "log-probs of drafted tokens are not those of the policy",
    "sampler_type": "only its Torch sampler reports the log-probs of what it sampled from",
    "max_beam_width": "answers are sampled",
    "enable_lora": "adapters are worked into the weights",
    "lora_config": "adapters are worked into the weights",
    "sleep_config": "weights are kept while it sleeps",
    "skip_tokenizer_init": "strings that end an answer need the tokenizer",
}
_PLACEMENT = ("placement_groups", "placement_bundle_indices", "per_worker_gpu_share")
"""Arguments of ``AsyncLLM`` beside those of the engine."""
_PROBE_SECONDS = 1.0
_STEP_TOKENS = 8192
"""Tokens of a forward pass, TensorRT-LLM's own default; a prompt must fit into one when it is not cut."""


@dataclass(eq=False)
class _Job:
    """A request under way.

    Attributes:
        request: asked for.
        tokens, log_probs: sampled so far.
        answer: that TensorRT-LLM is making, while it does.
        interrupted: it was told to stop, to be gone on with later.
        ended: the client does not want more.
    """

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    answer: Any = None
    interrupted: bool = False
    ended: bool = False


class TrtllmBackend:
    """TensorRT-LLM's asynchronous engine, whose workers are actors of a small Ray of its own.

    TensorRT-LLM cannot hold a request where it is. For a pause, or while weights arrive, requests are cancelled and keep their
    tokens; later they are gone on with behind these.
    """

    def __init__(self, settings: Settings) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "TensorRT-LLM needs an NVIDIA GPU, and here is none",
                why="it has no kernels for CPUs",
                fix="actor_rollout_ref.rollout.name=native or vllm",
                where="actor_rollout_ref.rollout.name",
            )
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]  # of the trainer's Ray
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import tensorrt_llm

        self.device, self.max_cache_tokens = "cuda", settings.max_cache_tokens
        self._stats: dict[str, Any] = {
            **dict.fromkeys(("requests", "prefill_tokens", "decode_tokens"), 0),
            "version": tensorrt_llm.__version__,
        }
        self._settings = settings
        self._arrivals = Arrivals(settings.model)
        self._jobs: dict[str, _Job] = {}
        self._changed = asyncio.Condition()
        self._paused = self._expects = False
        self._watch: asyncio.Task[None] | None = None
        self._engine = self._made(self._options(settings))

    @classmethod
    async def opened(cls, settings: Settings) -> TrtllmBackend:
        """Start the engine and wait until it serves."""
        backend = cls(settings)
        await backend._engine.setup_async()
        backend._watch = asyncio.create_task(backend._give_up_when_lost(), name="TensorRT-LLM's workers")
        return backend

    async def _give_up_when_lost(self) -> None:
        """End the server when a worker is gone: what asks TensorRT-LLM for an answer then may wait for ever."""
        while True:
            try:
                await self._engine.collective_rpc("hone_alive")
            except Exception as error:  # noqa: BLE001 - the method does nothing: whatever it is, the worker is lost
                print(f"a worker of TensorRT-LLM is lost: {first_lines(error)}", file=sys.stderr)  # noqa: T201 - the log
                give_up()
            await asyncio.sleep(_PROBE_SECONDS)

    def _options(self, settings: Settings) -> dict[str, Any]:
        """Arguments of the engine: Hone's, and over them those of the user."""
        check_owned("trtllm", settings.options, _OWNED)
        options: dict[str, Any] = {
            "model": settings.model,
            "tokenizer": settings.tokenizer,
            "backend": "pytorch",
            "dtype": settings.dtype,
            "max_seq_len": settings.max_model_len,
            "max_input_len": settings.max_model_len,
            "max_batch_size": settings.max_num_seqs,
            "max_num_tokens": max(_STEP_TOKENS, settings.max_model_len),
            "ray_worker_extension_cls": EXTENSION,
            **settings.options,
        }
        bounded = {} if settings.max_cache_tokens is None else {"max_tokens": settings.max_cache_tokens}
        return {**options, "kv_cache_config": {**bounded, **(options.get("kv_cache_config") or {})}}

    def _made(self, options: dict[str, Any]) -> Any:
        from tensorrt_llm.llmapi import KvCacheConfig

        try:
            from tensorrt_llm import AsyncLLM
            from tensorrt_llm.llmapi import TorchLlmArgs
        except ImportError as error:
            raise ConfigError(
                f"TensorRT-LLM {self._stats['version']} cannot take new weights: {error}",
                why="it takes them through AsyncLLM, which newer versions have",
                fix="hone engines install trtllm --force",
            ) from error
        cache = options["kv_cache_config"]
        check_names("trtllm", options, [*TorchLlmArgs.model_fields, *_PLACEMENT], called="TensorRT-LLM")
        check_names("trtllm", cache, KvCacheConfig.model_fields, called="TensorRT-LLM's kv_cache_config")
        try:
            return AsyncLLM(**{**options, "kv_cache_config": KvCacheConfig(**cache)})
        except (ValueError, TypeError) as error:
            what = f"TensorRT-LLM refuses its arguments: {first_lines(error)}"
            raise refused("trtllm", what, "the key that it names") from error

    # requests --------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        """Serve one request."""
        _check_sampling(request.sampling)
        job, began = _Job(request), time.perf_counter()
        self._jobs[request.request_id] = job
        try:
            reason = None
            while reason is None:
                async with self._changed:
                    await self._changed.wait_for(lambda: job.ended or self._serves())
                reason = StopReason.ABORTED if job.ended else await self._continued(job)
        finally:
            del self._jobs[request.request_id]
        self._stats["requests"] += 1
        self._stats["prefill_tokens"] += len(request.prompt_ids)
        self._stats["decode_tokens"] += len(job.tokens)
        return Completion(
            request.request_id,
            job.tokens,
            job.log_probs,
            list(job.log_probs),
            reason,
            seconds=time.perf_counter() - began,
        )

    async def _continued(self, job: _Job) -> StopReason | None:
        """Have more tokens made; None when the request is to be gone on with later."""
        from tensorrt_llm.executor.utils import RequestError

        try:
            job.interrupted = False
            job.answer = self._engine.generate_async(
                {"prompt_token_ids": [*job.request.prompt_ids, *job.tokens]},
                self._sampling(sampling_arguments(job.request, len(job.tokens))),
            )
            made = (await job.answer.aresult()).outputs[0]
        except RequestError as error:
            raise GenerationError(f"TensorRT-LLM refuses a request: {first_lines(error)}") from error
        finally:
            job.answer = None
            async with self._changed:
                self._changed.notify_all()
        cancelled = made.finish_reason == "cancelled"
        _take(job, made, cancelled)
        return self._ending(job, made.finish_reason)

    def _ending(self, job: _Job, said: str | None) -> StopReason | None:
        asked = job.request.sampling
        end = first_end(self._tokenizer, job.tokens, asked.stop) if asked.stop else None
        if (
            end is not None
        ):  # TensorRT-LLM finds a string only where it is written in the tokens that it would write itself
            del job.tokens[end:], job.log_probs[end:]
            return StopReason.STOP
        if said != "cancelled":
            return _REASONS.get(said or "", StopReason.ERROR)
        if job.tokens and not asked.ignore_eos and job.tokens[-1] in asked.stop_token_ids:
            return StopReason.STOP
        if len(job.tokens) >= asked.max_tokens:
            return StopReason.LENGTH
        if job.ended:
            return StopReason.ABORTED
        return None if job.interrupted else StopReason.ERROR

    @property
    def _tokenizer(self) -> Any:
        return self._engine.tokenizer

    def _sampling(self, arguments: Mapping[str, Any]) -> Any:
        from tensorrt_llm import SamplingParams as Sampling

        modes = type(Sampling().logprobs_mode)
        return Sampling(**{**arguments, "logprobs_mode": modes(arguments["logprobs_mode"])})

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with the tokens they have."""
        for job in [self._jobs[name] for name in request_ids if name in self._jobs]:
            job.ended = True
            if job.answer is not None:
                job.answer.abort()
        async with self._changed:
            self._changed.notify_all()

    async def pause(self) -> None:
        """Stop decoding; requests are taken up again behind the tokens they have."""
        self._paused = True
        await self._interrupt()

    async def resume(self) -> None:
        """Go on, or once new weights have arrived if they are on their way."""
        self._paused = False
        async with self._changed:
            self._changed.notify_all()

    async def sleep(self) -> None:
        """Forget cached prefixes. The memory of the cache stays with TensorRT-LLM."""
        await self._engine.collective_rpc("reset_prefix_cache")

    def _serves(self) -> bool:
        return not (self._paused or self._expects)

    async def _interrupt(self) -> None:
        """Have nothing computed any more."""
        for job in self._jobs.values():
            if job.answer is not None:
                job.interrupted = True
                job.answer.abort()
        async with self._changed:
            await self._changed.wait_for(lambda: all(job.answer is None for job in self._jobs.values()))

    # weights ---------------------------------------------------------------------------------------------------------

    async def begin_weights(self) -> None:
        """New weights follow. Nothing is computed until they have all arrived."""
        self._expects = True
        self._arrivals.begin()
        await self._interrupt()
        await self._engine.collective_rpc("hone_begin_weights")

    async def load_weights(self, parcel: dict[str, Any]) -> None:
        """Take a parcel."""
        for names in await self._engine.collective_rpc("hone_load_weights", args=(json.dumps(parcel),)):
            self._arrivals.note(names)

    async def finish_weights(self) -> None:
        """Make what is derived of the weights anew, and forget what was computed with the old ones.

        Raises:
            GenerationError: some have not arrived; TensorRT-LLM itself would go on with the old ones.
        """
        self._arrivals.check()
        await self._engine.collective_rpc("hone_finish_weights")
        self._expects = False
        async with self._changed:
            self._changed.notify_all()

    def stats(self) -> dict[str, Any]:
        """Counters since start."""
        return dict(self._stats)

    def close(self) -> None:
        """End TensorRT-LLM's processes."""
        if self._watch is not None:
            self._watch.cancel()
        self._engine.shutdown()


def sampling_arguments(request: GenerationRequest, made: int) -> dict[str, Any]:
    """The request's sampling in TensorRT-LLM's words.

    Args:
        request: asked for.
        made: tokens of its answer that are there already. What follows them is drawn with a seed of its own.
    """
    asked = request.sampling
    return {
        "max_tokens": asked.max_tokens - made,
        "temperature": asked.temperature,
        "seed": (request.seed + made) % 2**63,
        "ignore_eos": True,  # stopping tokens are named by the request alone, not by the model's files
        "stop_token_ids": list(asked.stop_token_ids) if asked.stop_token_ids and not asked.ignore_eos else None,
        "stop": list(asked.stop) or None,
        "include_stop_str_in_output": True,
        "detokenize": False,
        "add_special_tokens": False,
        "logprobs": 0,
        "logprobs_simple_format": True,
        # raw is of the scores as they are, which for greedy is what is wanted; processed is of what was sampled from
        "logprobs_mode": "raw" if asked.temperature == 0 else "processed",
    }


def _check_sampling(asked: SamplingParams) -> None:
    """The distribution sampled from is the policy.

    Raises:
        GenerationError: it is another one.
    """
    cuts = (
        {"top_k": (asked.top_k, -1), "top_p": (asked.top_p, 1.0), "min_p": (asked.min_p, 0.0)}
        if asked.temperature
        else {}
    )
    others = {**cuts, "repetition_penalty": (asked.repetition_penalty, 1.0)}
    for name, (value, nothing) in others.items():
        if value != nothing:
            raise GenerationError(
                f"TensorRT-LLM cannot serve {name}={value:g}",
                why="it reports one log-prob a token, and with that setting those of the policy are other than those sampled from",
                fix=f"actor_rollout_ref.rollout.{name}={nothing:g} (and val_kwargs likewise), or rollout.name=native or vllm",
            )


def _take(job: _Job, made: Any, cancelled: bool) -> None:
    """Keep what was made. Of a cancelled answer tokens and log-probs may differ in number by those of the last step."""
    tokens, log_probs = list(made.token_ids or []), [float(entry) for entry in made.logprobs or []]
    if cancelled:
        count = min(len(tokens), len(log_probs))
        tokens, log_probs = tokens[:count], log_probs[:count]
    if len(tokens) != len(log_probs):
        raise GenerationError(f"TensorRT-LLM reported {len(log_probs)} log-probs of {len(tokens)} tokens")
    job.tokens += tokens
    job.log_probs += log_probs
