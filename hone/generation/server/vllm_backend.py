"""vLLM as the backend of a server. Runs in vLLM's environment."""

# pyright: reportMissingImports=false
from __future__ import annotations

import inspect
import math
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hone.data.image_processor import ImageProcessor, load_image_processor
from hone.data.images import ImageData, key_of, place_of
from hone.data.tokenizer import load_tokenizer
from hone.data.types import StopReason
from hone.errors import ConfigError, GenerationError, RequestError
from hone.generation.grammars import lark_of
from hone.generation.native.sampler import never_sampled
from hone.generation.protocol import Alternatives, Completion, GenerationRequest, SamplingParams
from hone.generation.remote.gpus import visible_uuids
from hone.generation.remote.messages import name_of
from hone.generation.server.arguments import (
    ADJUSTMENTS,
    UNREPORTED,
    check_names,
    check_owned,
    check_served,
    one_line,
    refused,
    refused_experts,
)
from hone.generation.server.backend import BackendSettings, PackagedBackend
from hone.generation.server.processes import binding, give_up

OPTIONS: dict[str, Any] = {
    "limit_mm_per_prompt": {"video": 0},
    "mm_device_do_normalize": False,
    "mm_processor_cache_gb": 0,
}
"""Arguments of vLLM for a model that reads images: pixels arrive normalised, and videos have no place in its memory."""


class ImagePrompts:
    """Maker of prompts with images, for models of a grid (Qwen-VL).

    vLLM's processor would prepare pixels with other kernels, and expand a placeholder by itself. Here Hone's processor does
    both, so that engine and trainer compute the same inputs. vLLM gets the prompt with a placeholder for each token of an
    image, the pixels, and where they belong.
    """

    def __init__(self, processor: ImageProcessor, renderer: Any) -> None:
        self._processor, self._renderer = processor, renderer

    def prompt(self, request: GenerationRequest) -> Any:
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import PlaceholderRange

        by_key = {image.key: image for image in request.images}
        starts = [index for index, token in enumerate(request.prompt_ids) if token < 0 and place_of(token) == 0]
        shown = [by_key[key_of(request.prompt_ids[start])] for start in starts]
        ranges = [
            PlaceholderRange(start, self._processor.pixels(image).count)
            for start, image in zip(starts, shown, strict=True)
        ]
        return mm_input(
            [self._processor.placeholder if token < 0 else token for token in request.prompt_ids],
            self._items(shown),
            {"image": [name_of(image) for image in shown]},
            {"image": ranges},
        )

    def _items(self, images: Sequence[ImageData]) -> Any:
        """Return vLLM's arguments for the vision tower."""
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalKwargsItems

        pixels = [self._processor.pixels(image).values for image in images]
        features = BatchFeature({name: torch.cat([one[name] for one in pixels]) for name in pixels[0]})
        fields = self._renderer.get_mm_processor()._get_mm_fields_config(features, {})
        return MultiModalKwargsItems.from_hf_inputs(features, fields)


_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}
_EXPERTS = "enable_return_routed_experts"
_OWNED = {
    "logprobs_mode": "both log-probs are reported, of the policy and of the distribution sampled from",
    "worker_extension_cls": "Hone's worker extension loads new weights",
    "generation_config": "the run's configuration sets the sampling parameters",
    "enable_sleep_mode": "rollout.free_cache_engine sets it",
}
_COUNTERS = ("requests", "prefill_tokens", "decode_tokens", "cached_tokens", "preemptions")
_DRAFTS = {"method": "ngram", "rejection_sample_method": "standard"}
"""Keys of ``speculative_config``, each with the value that is verified to sample from the policy."""
_CPU_CACHE_BYTES = 2 * 2**30
"""Default cache size on a CPU; vLLM's default is half of the memory."""
_CPU_BLOCK = 32
"""Tokens of a cache block on a CPU: prefixes are cached by block, and vLLM's 128 exceed most prompts."""

_NEVER = -1e4
"""Bias of a token that is never sampled."""


class VllmBackend(PackagedBackend):
    """vLLM's asynchronous engine, whose workers run in separate processes."""

    def __init__(self, settings: BackendSettings) -> None:
        import vllm
        from transformers import AutoConfig, AutoTokenizer
        from vllm.platforms import current_platform

        processor = load_image_processor(settings.model, load_tokenizer(settings.tokenizer))
        self.reads_images = processor is not None and processor.in_grid
        self._on_cpu = current_platform.is_cpu()
        self.device = "cpu" if self._on_cpu else current_platform.device_type
        self._stats: dict[str, Any] = {**dict.fromkeys(_COUNTERS, 0), "version": vllm.__version__}
        self._lora: Any = None
        self._drafts = bool(settings.options.get("speculative_config"))
        if self._drafts:
            self._stats |= {"drafted_tokens": 0, "accepted_tokens": 0}
        self._engine = self._start(self._options(settings))
        self._images = ImagePrompts(processor, self._engine.renderer) if processor and processor.in_grid else None
        tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
        self._end: int | None = tokenizer.eos_token_id
        vocabulary = AutoConfig.from_pretrained(settings.model).get_text_config().vocab_size
        outside = None if self._drafts else never_sampled(tokenizer, vocabulary, torch.device("cpu"))
        self._outside = {} if outside is None else dict.fromkeys(outside.nonzero()[:, 0].tolist(), _NEVER)
        cache = self._engine.vllm_config.cache_config
        blocks = cache.num_gpu_blocks
        self.max_cache_tokens: int | None = blocks * cache.block_size if blocks else None
        parallel = self._engine.vllm_config.parallel_config
        workers = parallel.world_size * parallel.data_parallel_size
        self.gpus = [] if self._on_cpu else visible_uuids()[:workers]
        self._prepared = False
        self._asleep: set[str] = set()

    def _options(self, settings: BackendSettings) -> dict[str, Any]:
        check_owned("vllm", settings.options, _OWNED)
        _check_drafts(settings.options)
        if self._on_cpu and settings.options.get("enable_expert_parallel"):
            raise ConfigError(
                "vLLM cannot divide experts over processes on a CPU",
                why="its CPU function accesses the experts of other processes and crashes (0.32.0)",
                fix="actor_rollout_ref.rollout.expert_parallel_size=1",
                where="actor_rollout_ref.rollout.expert_parallel_size",
            )
        if settings.options.get(_EXPERTS):
            if self._on_cpu:
                raise refused_experts("vLLM", "the part of it that does needs Triton (0.32.0)")
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        options: dict[str, Any] = {
            "model": settings.model,
            "tokenizer": settings.tokenizer,
            "dtype": settings.dtype,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "generation_config": "vllm",
            "structured_outputs_config": {"backend": "guidance"},
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "hone.generation.server.vllm_worker.HoneWorker",
            "seed": 0,
            "disable_log_stats": True,
        }
        if self._on_cpu:
            options |= {"block_size": _CPU_BLOCK, "enforce_eager": True}
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(self._cache_bytes(settings) / 2**30))
            workers = settings.options.get("tensor_parallel_size", 1) * settings.options.get("data_parallel_size", 1)
            if workers == 1:  # the worker runs in the process of the engine's core, which saves a process
                os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            if settings.cpus or workers > 1:
                os.environ["VLLM_CPU_OMP_THREADS_BIND"] = binding(settings.cpus, workers)
        else:
            options["enable_sleep_mode"] = settings.sleeps
            if settings.max_cache_tokens is not None:
                options["kv_cache_memory_bytes"] = self._cache_bytes(settings)
        return {**options, **(OPTIONS if self.reads_images else {}), **settings.options}

    def _cache_bytes(self, settings: BackendSettings) -> int:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(settings.model).get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = 4 if settings.dtype == "float32" else 2
        token = 2 * config.num_hidden_layers * kv_heads * head_dim * width
        if settings.max_cache_tokens is not None:
            return token * settings.max_cache_tokens
        wanted = token * settings.max_num_seqs * (settings.max_model_len + _CPU_BLOCK)
        return max(min(wanted, _CPU_CACHE_BYTES), token * (settings.max_model_len + _CPU_BLOCK))

    def _start(self, options: Mapping[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        check_names("vllm", options, inspect.signature(AsyncEngineArgs).parameters, title="vLLM")
        try:
            arguments = AsyncEngineArgs(**options)
            arguments.create_engine_config()
        except (ValueError, TypeError) as error:
            what = f"vLLM refuses its arguments: {one_line(error)}"
            raise refused("vllm", what, "the key that it names, or its default") from error
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[_counter(self._stats)])

    # requests --------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        check_served("vLLM", request.sampling, UNREPORTED)
        if self._drafts:
            check_served("vLLM with speculative decoding", request.sampling, ADJUSTMENTS)
        _check_ends(request.sampling, self._end)
        await self._prepare()
        if self._drafts and request.sampling.min_p > 0:
            raise RequestError(
                f"vLLM cannot serve min_p={request.sampling.min_p:g} with speculative decoding",
                why="it verifies drafts without min_p",
                fix="actor_rollout_ref.rollout.min_p=0, or actor_rollout_ref.rollout.speculative.method=null",
                field="min_p",
            )
        final = None
        try:
            prompt = TokensPrompt(prompt_token_ids=request.prompt_ids)
            if request.images and self._images is not None:
                prompt = self._images.prompt(request)
            answers = self._engine.generate(
                prompt, _sampling_params(request, self._outside), request.request_id, lora_request=self._lora
            )
            async for output in answers:
                final = output
        except EngineDeadError:
            give_up()
        except ValueError as error:
            raise RequestError(f"vLLM refuses a request: {one_line(error)}") from error
        if final is None:
            raise GenerationError("vLLM returned no completion")
        answer = final.outputs[0]
        tokens = list(answer.token_ids)
        sampling, policy = _log_probs(tokens, answer.logprobs or [])
        alternatives = _alternatives(tokens, policy, answer.logprobs or [], request.sampling.top_log_probs)
        self._count(request, tokens, final.num_cached_tokens or 0)
        reason = _REASONS.get(answer.finish_reason or "", StopReason.ERROR)
        seconds, first_token = _seconds(final.metrics) if tokens else (0.0, None)
        return Completion(
            request.request_id,
            tokens,
            policy,
            sampling,
            reason,
            seconds=seconds,
            first_token_seconds=first_token,
            alternatives=alternatives,
            expert_ids=_expert_ids(answer.routed_experts, len(request.prompt_ids) + len(tokens) - 1),
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            await self._engine.abort(list(request_ids))

    async def pause(self) -> None:
        """Stop decoding; requests keep their state. (vLLM's method would sleep 20 ms in addition.)"""
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free memory: at level 1 weights move to host memory, at level 2 they are dropped. On a CPU vLLM only stops scheduling."""
        await self._engine.sleep(level=1 if keep_weights else 2)
        self._asleep = {"weights", "kv_cache"}

    async def wake(self, *, cache: bool) -> None:
        """Take memory back. Requests are scheduled once all of it is back."""
        tags = self._asleep if cache else self._asleep & {"weights"}
        if tags:  # memory that is awake must not be mapped again
            await self._engine.wake_up(sorted(tags))
        self._asleep = self._asleep - tags

    # weights ---------------------------------------------------------------------------------------------------------

    async def begin_weights(self, version: int) -> None:
        await self._prepare()
        await self._engine.collective_rpc("hone_begin_weights")

    async def load_weights(self, chunk: dict[str, Any]) -> None:
        await self._engine.collective_rpc("hone_load_weights", args=(chunk,))

    async def finish_weights(self) -> None:
        await self._engine.collective_rpc("hone_finish_weights")
        await self._engine.reset_prefix_cache(reset_running_requests=True)
        if self.reads_images:
            await self._engine.reset_encoder_cache()

    async def _prepare(self) -> None:
        if not self._prepared:
            self._prepared = True
            await self._engine.collective_rpc("hone_prepare")


def _check_drafts(options: Mapping[str, Any]) -> None:
    config = options.get("speculative_config") or {}
    for key, only in _DRAFTS.items():
        if config and config.get(key, "standard") != only:
            raise refused(
                "vllm",
                f"speculative decoding with {key}={config.get(key)} is not supported: only {only} is verified to sample from the policy",
                f"engine_kwargs.vllm.speculative_config.{key}={only}",
            )


def _sampling_params(request: GenerationRequest, outside: Mapping[int, float]) -> Any:
    """Return the request's sampling parameters for vLLM. Only its stop tokens count, not those in the model's files.

    Args:
        outside: bias of the ids that the tokenizer lacks.
    """
    import vllm
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    sampling: SamplingParams = request.sampling
    return vllm.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=request.seed % 2**63,
        ignore_eos=True,
        stop_token_ids=None if sampling.ignore_eos else list(sampling.stop_token_ids),
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias={**dict(sampling.logit_bias), **outside} or None,
        structured_outputs=None
        if sampling.constraint is None
        else StructuredOutputsParams(grammar=lark_of(sampling.constraint)),
        logprobs=sampling.top_log_probs,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _expert_ids(routed: Any, tokens: int) -> Any:
    """Return the experts of the first ``tokens`` tokens, of prompt and response without the last, end to end.

    Empty where vLLM was not asked for ``routed [tokens, layers, experts of a token]``.
    """
    return () if routed is None else routed[:tokens].astype("int16").ravel()


def _check_ends(sampling: SamplingParams, end: int | None) -> None:
    """Check that a constrained response ends with the tokenizer's end token, the one that vLLM allows after it."""
    if sampling.constraint is not None and (sampling.ignore_eos or end not in sampling.stop_token_ids):
        raise RequestError(
            "vLLM cannot serve a constraint unless the tokenizer's end token ends the response",
            why="it samples that token once the constraint is satisfied",
            fix=f"ignore_eos=false and stop_token_ids with {end}, or actor_rollout_ref.rollout.name=native",
            field="constraint",
        )


def _log_probs(tokens: Sequence[int], reported: Sequence[Mapping[int, Any]]) -> tuple[list[float], list[float]]:
    """Return log-probs as sampled, and under the raw policy, which the worker stores in place of the rank."""
    drawn = [step[token] for token, step in zip(tokens, reported, strict=True)]
    policy = [struct.unpack("<f", struct.pack("<i", entry.rank))[0] for entry in drawn]
    return [entry.logprob for entry in drawn], policy


def _alternatives(
    tokens: Sequence[int], policy: Sequence[float], reported: Sequence[Mapping[int, Any]], count: int
) -> list[Alternatives]:
    """Return the likeliest tokens at every position; vLLM reports the sampled one apart from the likeliest others."""
    positions: list[Alternatives] = []
    for token, log_prob, step in zip(tokens, policy, reported, strict=True):
        pairs = [(token, log_prob), *((other, entry.logprob) for other, entry in step.items() if other != token)]
        positions.append(sorted(pairs, key=lambda pair: -pair[1])[:count])
    return positions if count else []


def _counter(stats: dict[str, Any]) -> type:
    """Return a vLLM logger class that counts preemptions and drafts; a logger also makes vLLM record request times."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            """Do nothing."""

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            if iteration_stats is not None:
                stats["preemptions"] += iteration_stats.num_preempted_reqs
            drafts = getattr(scheduler_stats, "spec_decoding_stats", None)
            if drafts is not None:
                stats["drafted_tokens"] += drafts.num_draft_tokens
                stats["accepted_tokens"] += drafts.num_accepted_tokens

        def log_engine_initialized(self) -> None:
            """Do nothing."""

    return Counter


def _seconds(times: Any) -> tuple[float, float]:
    return times.last_token_ts - times.scheduled_ts, times.first_token_ts - times.scheduled_ts
