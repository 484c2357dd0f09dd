"""SGLang as the backend of a server. Runs in SGLang's environment."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hone.data.types import StopReason
from hone.errors import GenerationError, RequestError
from hone.generation.protocol import Completion, GenerationRequest
from hone.generation.remote.gpus import visible_uuids
from hone.generation.server.arguments import (
    ADJUSTMENTS,
    check_names,
    check_owned,
    check_served,
    one_line,
    refused,
    refused_experts,
)
from hone.generation.server.backend import BackendSettings, PackagedBackend
from hone.generation.server.processes import SAMPLED_FROM, give_up
from hone.generation.server.sglang_processes import run_detokenizer, run_scheduler

_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}
_OWNED = {
    "speculative_algorithm": "its sampler of drafted tokens does not report their log-probs under the policy",
    "sampling_backend": "Hone's sampler is used, which has seeds and reports both log-probs",
    "sampling_defaults": "the run's configuration sets the sampling parameters",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "enable_lora": "adapters are merged into the weights",
    "enable_memory_saver": "rollout.free_cache_engine sets it",
}
_EXPERTS = "enable_return_routed_experts"
_CPU_CACHE_TOKENS = 65536
"""Default capacity of the cache on a CPU."""
_RESERVED = 8
"""Tokens per sequence that SGLang reserves, with a margin."""
_FORGET_SECONDS = 10.0


class SglangBackend(PackagedBackend):
    """SGLang's engine, whose scheduler and detokenizer run in separate processes."""

    def __init__(self, settings: BackendSettings) -> None:
        # positions stay within the model's limit: only SGLang's reserve exceeds it
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        self._on_cpu = not torch.cuda.is_available()
        if self._on_cpu:
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
            os.environ["OMP_NUM_THREADS"] = str(len(settings.cpus or os.sched_getaffinity(0)))
            os.environ["OMP_WAIT_POLICY"] = (
                "PASSIVE"  # its operations are small, so spinning threads would slow it down
            )
        import sglang

        self.device = "cpu" if self._on_cpu else "cuda"
        self.max_cache_tokens = settings.max_cache_tokens or (_CPU_CACHE_TOKENS if self._on_cpu else None)
        self._stats: dict[str, Any] = {
            **dict.fromkeys(("requests", "prefill_tokens", "decode_tokens", "cached_tokens"), 0),
            "version": sglang.__version__,
        }
        self._rpc_lock = asyncio.Lock()
        self._frees_memory, self._asleep = settings.sleeps and not self._on_cpu, list[str]()
        options = self._options(settings)
        self._reports_experts = bool(options.get(_EXPERTS))
        self._engine = self._start(options)
        copies = 1 if options.get("enable_dp_attention") else options.get("dp_size", 1)
        self.gpus = (
            [] if self._on_cpu else visible_uuids()[: copies * options.get("tp_size", 1) * options.get("pp_size", 1)]
        )
        self._manager = self._engine.tokenizer_manager
        self._manager.auto_create_handle_loop()
        # SGLang sends this signal when one of its processes has ended
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, give_up)

    def _options(self, settings: BackendSettings) -> dict[str, Any]:
        check_owned("sglang", settings.options, _OWNED)
        if settings.options.get(_EXPERTS) and self._on_cpu:
            raise refused_experts("SGLang", "the part of it that does allocates on a CUDA device (0.5.23)")
        options: dict[str, Any] = {
            "model_path": settings.model,
            "tokenizer_path": settings.tokenizer,
            "dtype": settings.dtype,
            "context_length": settings.max_model_len + _RESERVED,
            "max_running_requests": settings.max_num_seqs,
            "sampling_defaults": "openai",
            "grammar_backend": "none",
            "random_seed": 0,
            "log_level": "warning",
        }
        if self.max_cache_tokens is not None:
            options["max_total_tokens"] = self.max_cache_tokens + _RESERVED
        if settings.sleeps and not self._on_cpu:
            options["enable_memory_saver"] = True
        if self._on_cpu:
            options |= {
                "device": "cpu",
                "attention_backend": "torch_native",
                "disable_cuda_graph": True,
                "disable_overlap_schedule": True,
            }
        return {**options, **settings.options}

    def _start(self, options: dict[str, Any]) -> Any:
        import msgspec
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs

        class HoneEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)
            run_detokenizer_process_func = staticmethod(run_detokenizer)

        known = [field.name for field in msgspec.structs.fields(ServerArgs)]
        check_names("sglang", options, known, title="SGLang")
        try:
            return HoneEngine(**options)
        except (ValueError, TypeError, AssertionError) as error:
            raise refused(
                "sglang", f"SGLang refuses its arguments: {one_line(error)}", "the key that it names"
            ) from error

    # requests --------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        from sglang.srt.managers.io_struct import GenerateReqInput

        generate_input = GenerateReqInput(
            rid=_name(request.request_id),
            input_ids=list(request.prompt_ids),
            sampling_params=_sampling_params(request),
            return_logprob=True,
            return_routed_experts=self._reports_experts,
        )
        started, final = time.perf_counter(), None
        async for output in self._manager.generate_request(generate_input, None):
            final = output
        if final is None:
            raise GenerationError("SGLang returned no completion")
        meta_info = final["meta_info"]
        reported = meta_info.get("output_token_logprobs") or []
        tokens, policy = [entry[1] for entry in reported], [float(entry[0]) for entry in reported]
        sampled_from = list(meta_info.get(SAMPLED_FROM) or [])
        if request.sampling.top_k == 1 and request.sampling.temperature > 0:
            sampled_from = [0.0] * len(tokens)  # there was no choice
        if len(sampled_from) != len(tokens):
            raise GenerationError(f"SGLang reported {len(sampled_from)} log-probs for {len(tokens)} tokens")
        self._count(request, tokens, meta_info.get("cached_tokens", 0))
        reason = _REASONS.get((meta_info["finish_reason"] or {}).get("type", ""), StopReason.ERROR)
        return Completion(
            request.request_id,
            tokens,
            policy,
            sampled_from,
            reason,
            seconds=time.perf_counter() - started,
            expert_ids=_expert_ids(meta_info.get("routed_experts")),
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            self._manager.abort_request(rid=_name(name))

    async def pause(self) -> None:
        await self._all("hone_pause")

    async def resume(self) -> None:
        await self._all("hone_resume")

    async def sleep(self, *, keep_weights: bool) -> None:
        """Drop cached prefixes after the running computation has ended; on a GPU free the cache, and weights that are not kept."""
        await self._forget()
        if self._frees_memory:
            self._asleep = ["kv_cache"] if keep_weights else ["kv_cache", "weights"]
            await self._all("hone_release", tags=",".join(self._asleep))

    async def wake(self, *, cache: bool) -> None:
        tags = [tag for tag in self._asleep if cache or tag == "weights"]
        if tags:
            await self._all("hone_reclaim", tags=",".join(tags))
        self._asleep = [tag for tag in self._asleep if tag not in tags]

    async def _forget(self) -> None:
        deadline = time.monotonic() + _FORGET_SECONDS
        while True:
            try:
                return await self._all("hone_forget")
            except GenerationError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.02)

    # weights ---------------------------------------------------------------------------------------------------------

    async def begin_weights(self, version: int) -> None:
        await self._all("hone_begin_weights")

    async def load_weights(self, chunk: dict[str, Any]) -> None:
        await self._all("hone_load_weights", chunk=json.dumps(chunk))

    async def finish_weights(self) -> None:
        await self._all("hone_finish_weights")

    async def _all(self, method: str, **fields: str) -> None:
        """Call a method of all schedulers (:class:`hone.generation.server.sglang_worker.HoneScheduler`)."""
        async with self._rpc_lock:
            try:
                await asyncio.to_thread(self._engine.collective_rpc, method, **fields)
            except AssertionError as error:
                raise GenerationError(one_line(error)) from error


def _name(request_id: str) -> str:
    """Return a name that is not a prefix of another name, because SGLang aborts by name prefix."""
    return f"{request_id}."


def _expert_ids(routed: str | None) -> Any:
    """Return the experts of prompt and response without the last token, end to end; empty where SGLang was not asked for them.

    Args:
        routed: int32 ``[tokens, layers, experts of a token]`` in base64, or None.
    """
    return () if routed is None else np.frombuffer(base64.b64decode(routed), dtype="<i4").astype("int16")


def _sampling_params(request: GenerationRequest) -> dict[str, Any]:
    """Return the request's sampling parameters for SGLang.

    Raises:
        RequestError: SGLang has another meaning for a parameter.
    """
    sampling = request.sampling
    check_served("SGLang", sampling, ADJUSTMENTS)
    if sampling.repetition_penalty != 1:
        raise RequestError(
            f"SGLang cannot serve repetition_penalty={sampling.repetition_penalty:g}",
            why="it penalises only tokens of the response; the other engines also those of the prompt",
            fix="actor_rollout_ref.rollout.repetition_penalty=1, or rollout.name=native or vllm",
            field="repetition_penalty",
        )
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "sampling_seed": (request.seed + 2**63) % 2**64 - 2**63,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
