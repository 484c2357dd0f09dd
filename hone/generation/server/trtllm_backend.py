"""TensorRT-LLM as the backend of a server. Runs in TensorRT-LLM's environment, on NVIDIA GPUs.

Written for the published interface of TensorRT-LLM 1.4.0rc1, which tests compare with it; it was never run. It uses only the
interface documented for reinforcement learning (``AsyncLLM``, ``collective_rpc``, ``WorkerExtension.update_weights``).
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
from pathlib import Path
from typing import Any

import torch

from hone.data.types import StopReason
from hone.errors import ConfigError, GenerationError, RequestError
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams, require_weights
from hone.generation.remote.gpus import visible_uuids
from hone.generation.server.arguments import ADJUSTMENTS, check_names, check_owned, check_served, one_line, refused
from hone.generation.server.backend import BackendSettings, PackagedBackend
from hone.generation.server.processes import give_up
from hone.generation.stop_strings import stop_length


def saved_weights(model: str) -> set[str]:
    """Return the names of the weights in the files of a Hugging Face directory."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in Path(model).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


EXTENSION = "hone.generation.server.trtllm_worker.HoneWorker"
ENVIRONMENT = {
    "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",  # a separate Ray from the trainer's
    "TLLM_DISABLE_MPI": "1",
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # weights are copied on one stream, in order
    "TRTLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of TensorRT-LLM, unless the user sets them."""
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
_OWNED = {
    "backend": "only its PyTorch backend takes new weights",
    "orchestrator_type": "it takes new weights only with Ray",
    "ray_worker_extension_cls": "Hone's worker extension loads new weights",
    "speculative_config": "log-probs of drafted tokens are not those of the policy",
    "sampler_type": "only its Torch sampler reports the log-probs of what it sampled from",
    "max_beam_width": "responses are sampled",
    "enable_lora": "adapters are merged into the weights",
    "lora_config": "adapters are merged into the weights",
    "sleep_config": "weights are kept during sleep",
    "skip_tokenizer_init": "stop strings need the tokenizer",
}
_PLACEMENT = ("placement_groups", "placement_bundle_indices", "per_worker_gpu_share")
"""Arguments of ``AsyncLLM`` besides those of the engine."""
_PROBE_SECONDS = 1.0
_STEP_TOKENS = 8192
"""Tokens of a forward pass, TensorRT-LLM's default; a prompt must fit without chunked prefill."""


@dataclass(eq=False)
class _ActiveRequest:
    """A running request, with what was sampled so far."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    answer: Any = None  # TensorRT-LLM's future, while it generates
    interrupted: bool = False  # whether it was cancelled to be continued later
    ended: bool = False  # whether the client has aborted it


class TrtllmBackend(PackagedBackend):
    """TensorRT-LLM's asynchronous engine, whose workers are actors of a separate small Ray.

    TensorRT-LLM cannot suspend a request. For a pause or a weight sync, requests are cancelled with their tokens; later new
    requests continue after these tokens.
    """

    def __init__(self, settings: BackendSettings) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "TensorRT-LLM needs an NVIDIA GPU, and this machine has none",
                why="it has no kernels for CPUs",
                fix="actor_rollout_ref.rollout.name=native or vllm",
                where="actor_rollout_ref.rollout.name",
            )
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]  # set by the trainer's Ray
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import tensorrt_llm

        self.device, self.max_cache_tokens = "cuda", settings.max_cache_tokens
        self._stats: dict[str, Any] = {
            **dict.fromkeys(("requests", "prefill_tokens", "decode_tokens"), 0),
            "version": tensorrt_llm.__version__,
        }
        self._settings = settings
        self._arrived: set[str] = set()
        self._jobs: dict[str, _ActiveRequest] = {}
        self._changed = asyncio.Condition()
        self._paused = self._expects = False
        self._watch: asyncio.Task[None] | None = None
        options = self._options(settings)
        self._engine = self._create_engine(options)
        workers = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        self.gpus = visible_uuids()[:workers]

    @classmethod
    async def start(cls, settings: BackendSettings) -> TrtllmBackend:
        """Start the engine and wait until it serves."""
        backend = cls(settings)
        await backend._engine.setup_async()
        backend._watch = asyncio.create_task(backend._give_up_when_lost(), name="TensorRT-LLM's workers")
        return backend

    async def _give_up_when_lost(self) -> None:
        """End the server when a worker has died, because TensorRT-LLM may then never answer."""
        while True:
            try:
                await self._engine.collective_rpc("hone_alive")
            except Exception as error:  # noqa: BLE001 - the method does nothing, so any error means a lost worker
                print(f"a worker of TensorRT-LLM is lost: {one_line(error)}", file=sys.stderr)  # noqa: T201 - the log
                give_up()
            await asyncio.sleep(_PROBE_SECONDS)

    def _options(self, settings: BackendSettings) -> dict[str, Any]:
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
        capacity = {} if settings.max_cache_tokens is None else {"max_tokens": settings.max_cache_tokens}
        return {**options, "kv_cache_config": {**capacity, **(options.get("kv_cache_config") or {})}}

    def _create_engine(self, options: dict[str, Any]) -> Any:
        from tensorrt_llm.llmapi import KvCacheConfig

        try:
            from tensorrt_llm import AsyncLLM
            from tensorrt_llm.llmapi import TorchLlmArgs
        except ImportError as error:
            raise ConfigError(
                f"TensorRT-LLM {self._stats['version']} cannot take new weights: {error}",
                why="AsyncLLM, which loads them, is missing in this version",
                fix="hone engines install trtllm --force",
            ) from error
        cache = options["kv_cache_config"]
        check_names("trtllm", options, [*TorchLlmArgs.model_fields, *_PLACEMENT], title="TensorRT-LLM")
        check_names("trtllm", cache, KvCacheConfig.model_fields, title="TensorRT-LLM's kv_cache_config")
        try:
            return AsyncLLM(**{**options, "kv_cache_config": KvCacheConfig(**cache)})
        except (ValueError, TypeError) as error:
            what = f"TensorRT-LLM refuses its arguments: {one_line(error)}"
            raise refused("trtllm", what, "the key that it names") from error

    # requests --------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        _check_sampling(request.sampling)
        job, start = _ActiveRequest(request), time.perf_counter()
        self._jobs[request.request_id] = job
        try:
            reason = None
            while reason is None:
                async with self._changed:
                    await self._changed.wait_for(lambda: job.ended or self._serves())
                reason = StopReason.ABORTED if job.ended else await self._generate_more(job)
        finally:
            del self._jobs[request.request_id]
        self._count(request, job.tokens)
        return Completion(
            request.request_id,
            job.tokens,
            job.log_probs,
            list(job.log_probs),
            reason,
            seconds=time.perf_counter() - start,
        )

    async def _generate_more(self, job: _ActiveRequest) -> StopReason | None:
        """Generate more tokens; return None if the request continues later."""
        from tensorrt_llm.executor.utils import RequestError as RefusedRequest

        try:
            job.interrupted = False
            job.answer = self._engine.generate_async(
                {"prompt_token_ids": [*job.request.prompt_ids, *job.tokens]},
                self._sampling(sampling_arguments(job.request, len(job.tokens))),
            )
            output = (await job.answer.aresult()).outputs[0]
        except RefusedRequest as error:
            raise RequestError(f"TensorRT-LLM refuses a request: {one_line(error)}") from error
        finally:
            job.answer = None
            async with self._changed:
                self._changed.notify_all()
        cancelled = output.finish_reason == "cancelled"
        _append(job, output, cancelled)
        return self._stop_reason(job, output.finish_reason)

    def _stop_reason(self, job: _ActiveRequest, finish_reason: str | None) -> StopReason | None:
        sampling = job.request.sampling
        end = stop_length(self._tokenizer, job.tokens, sampling.stop) if sampling.stop else None
        if end is not None:  # TensorRT-LLM detects a stop string only in the tokenization that it uses itself
            del job.tokens[end:], job.log_probs[end:]
            return StopReason.STOP
        if finish_reason != "cancelled":
            return _REASONS.get(finish_reason or "", StopReason.ERROR)
        if job.tokens and not sampling.ignore_eos and job.tokens[-1] in sampling.stop_token_ids:
            return StopReason.STOP
        if len(job.tokens) >= sampling.max_tokens:
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
        for job in [self._jobs[name] for name in request_ids if name in self._jobs]:
            job.ended = True
            if job.answer is not None:
                job.answer.abort()
        async with self._changed:
            self._changed.notify_all()

    async def pause(self) -> None:
        """Stop decoding; requests later continue after their tokens."""
        self._paused = True
        await self._interrupt()

    async def resume(self) -> None:
        """Resume decoding now, or after the weight sync if one is running."""
        self._paused = False
        async with self._changed:
            self._changed.notify_all()

    async def sleep(self, *, keep_weights: bool) -> None:
        """Drop cached prefixes. TensorRT-LLM keeps its memory."""
        await self._engine.collective_rpc("reset_prefix_cache")

    def _serves(self) -> bool:
        return not (self._paused or self._expects)

    async def _interrupt(self) -> None:
        """Cancel all running requests and wait until none runs."""
        for job in self._jobs.values():
            if job.answer is not None:
                job.interrupted = True
                job.answer.abort()
        async with self._changed:
            await self._changed.wait_for(lambda: all(job.answer is None for job in self._jobs.values()))

    # weights ---------------------------------------------------------------------------------------------------------

    async def begin_weights(self, version: int) -> None:
        """Prepare for new weights. Nothing is generated until all of them have arrived."""
        self._expects = True
        self._arrived = set()
        await self._interrupt()
        await self._engine.collective_rpc("hone_begin_weights")

    async def load_weights(self, chunk: dict[str, Any]) -> None:
        for names in await self._engine.collective_rpc("hone_load_weights", args=(json.dumps(chunk),)):
            self._arrived |= set(names)

    async def finish_weights(self) -> None:
        """Complete the weight sync, and drop the cache of the old weights.

        Raises:
            GenerationError: some weights have not arrived; TensorRT-LLM would keep the old ones.
        """
        expected = saved_weights(self._settings.model)
        require_weights(expected, expected - self._arrived)
        await self._engine.collective_rpc("hone_finish_weights")
        self._expects = False
        async with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        super().close()


def sampling_arguments(request: GenerationRequest, sampled: int) -> dict[str, Any]:
    """Return the request's sampling parameters for TensorRT-LLM; after ``sampled`` tokens the others get another seed."""
    sampling = request.sampling
    return {
        "max_tokens": sampling.max_tokens - sampled,
        "temperature": sampling.temperature,
        "seed": (request.seed + sampled) % 2**63,
        "ignore_eos": True,  # only the request's stop tokens count, not those in the model's files
        "stop_token_ids": list(sampling.stop_token_ids)
        if sampling.stop_token_ids and not sampling.ignore_eos
        else None,
        "stop": list(sampling.stop) or None,
        "include_stop_str_in_output": True,
        "detokenize": False,
        "add_special_tokens": False,
        "logprobs": 0,
        "logprobs_simple_format": True,
        # raw log-probs are those of temperature 1, as required for greedy; processed ones are of the distribution sampled from
        "logprobs_mode": "raw" if sampling.temperature == 0 else "processed",
    }


def _check_sampling(sampling: SamplingParams) -> None:
    check_served("TensorRT-LLM", sampling, ADJUSTMENTS)
    cuts = (
        {"top_k": (sampling.top_k, -1), "top_p": (sampling.top_p, 1.0), "min_p": (sampling.min_p, 0.0)}
        if sampling.temperature
        else {}
    )
    others = {**cuts, "repetition_penalty": (sampling.repetition_penalty, 1.0)}
    for name, (value, neutral) in others.items():
        if value != neutral:
            raise RequestError(
                f"TensorRT-LLM cannot serve {name}={value:g}",
                why="it reports one log-prob per token, and this setting makes the policy differ from the distribution sampled from",
                fix=f"actor_rollout_ref.rollout.{name}={neutral:g} (and val_kwargs likewise), or rollout.name=native or vllm",
                field=name,
            )


def _append(job: _ActiveRequest, output: Any, cancelled: bool) -> None:
    """Append the output's tokens. In a cancelled output the numbers of tokens and log-probs may differ by the last step's."""
    tokens, log_probs = list(output.token_ids or []), [float(entry) for entry in output.logprobs or []]
    if cancelled:
        count = min(len(tokens), len(log_probs))
        tokens, log_probs = tokens[:count], log_probs[:count]
    if len(tokens) != len(log_probs):
        raise GenerationError(f"TensorRT-LLM reported {len(log_probs)} log-probs for {len(tokens)} tokens")
    job.tokens += tokens
    job.log_probs += log_probs
