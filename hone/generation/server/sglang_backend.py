"""SGLang behind Hone's server. Runs in SGLang's own environment."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

from hone.data.types import StopReason
from hone.errors import GenerationError
from hone.generation.protocol import Completion, GenerationRequest
from hone.generation.server.arguments import check_names, check_owned, first_lines, refused
from hone.generation.server.backend import Settings
from hone.generation.server.processes import give_up
from hone.generation.server.sglang_processes import SAMPLED_FROM, run_detokenizer, run_scheduler

_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}
_OWNED = {
    "speculative_algorithm": "its sampler of drafted tokens does not report their log-probs under the policy",
    "sampling_backend": "Hone's sampler draws, which has seeds and reports both log-probs",
    "sampling_defaults": "sampling is what the run's configuration says",
    "skip_tokenizer_init": "strings that end an answer need the tokenizer",
    "dp_size": "rollout.num_replicas says how many copies of the model serve",
    "enable_lora": "adapters are worked into the weights",
    "enable_memory_saver": "weights are kept while it sleeps",
}
_CPU_CACHE_TOKENS = 65536
"""Capacity of the cache on a CPU when nothing is said."""
_RESERVED = 8
"""Tokens of a sequence that SGLang keeps to itself, with some to spare."""
_FORGET_SECONDS = 10.0


class SglangBackend:
    """SGLang's engine, whose scheduler and detokenizer run in processes of their own."""

    def __init__(self, settings: Settings) -> None:
        # positions never pass what the model allows: only SGLang's own reserve does
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        self._on_cpu = not torch.cuda.is_available()
        if self._on_cpu:
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
            os.environ["OMP_NUM_THREADS"] = str(len(settings.cpus or os.sched_getaffinity(0)))
            os.environ["OMP_WAIT_POLICY"] = (
                "PASSIVE"  # its operations are small: spinning threads would only be in the way
            )
        import sglang

        self.device = "cpu" if self._on_cpu else "cuda"
        self.max_cache_tokens = settings.max_cache_tokens or (_CPU_CACHE_TOKENS if self._on_cpu else None)
        self._stats: dict[str, Any] = {
            **dict.fromkeys(("requests", "prefill_tokens", "decode_tokens", "cached_tokens"), 0),
            "version": sglang.__version__,
        }
        self._asking = asyncio.Lock()
        self._engine = self._start(self._options(settings))
        self._manager = self._engine.tokenizer_manager
        self._manager.auto_create_handle_loop()
        # SGLang tells by this signal that a process of its own is gone
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, give_up)

    def _options(self, settings: Settings) -> dict[str, Any]:
        """Arguments of the engine: Hone's, and over them those of the user."""
        check_owned("sglang", settings.options, _OWNED)
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
        check_names("sglang", options, known, called="SGLang")
        try:
            return HoneEngine(**options)
        except (ValueError, TypeError, AssertionError) as error:
            raise refused(
                "sglang", f"SGLang refuses its arguments: {first_lines(error)}", "the key that it names"
            ) from error

    # requests --------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        """Serve one request."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked = GenerateReqInput(
            rid=_name(request.request_id),
            input_ids=list(request.prompt_ids),
            sampling_params=_sampling(request),
            return_logprob=True,
        )
        started, final = time.perf_counter(), None
        async for output in self._manager.generate_request(asked, None):
            final = output
        if final is None:
            raise GenerationError("SGLang gave no answer")
        told = final["meta_info"]
        reported = told.get("output_token_logprobs") or []
        tokens, policy = [entry[1] for entry in reported], [float(entry[0]) for entry in reported]
        sampled_from = list(told.get(SAMPLED_FROM) or [])
        if request.sampling.top_k == 1 and request.sampling.temperature > 0:
            sampled_from = [0.0] * len(tokens)  # there was no choice
        if len(sampled_from) != len(tokens):
            raise GenerationError(f"SGLang reported {len(sampled_from)} log-probs of {len(tokens)} tokens")
        self._stats["requests"] += 1
        self._stats["prefill_tokens"] += len(request.prompt_ids) - told.get("cached_tokens", 0)
        self._stats["cached_tokens"] += told.get("cached_tokens", 0)
        self._stats["decode_tokens"] += len(tokens)
        reason = _REASONS.get((told["finish_reason"] or {}).get("type", ""), StopReason.ERROR)
        seconds = time.perf_counter() - started
        return Completion(request.request_id, tokens, policy, sampled_from, reason, seconds=seconds)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with the tokens they have."""
        for name in request_ids:
            self._manager.abort_request(rid=_name(name))

    async def pause(self) -> None:
        """Stop decoding; requests stay where they are."""
        await self._all("hone_pause")

    async def resume(self) -> None:
        """Go on."""
        await self._all("hone_resume")

    async def sleep(self) -> None:
        """Forget cached prefixes, once nothing is computed any more."""
        deadline = time.monotonic() + _FORGET_SECONDS
        while True:
            try:
                return await self._all("hone_forget")
            except GenerationError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.02)

    # weights ---------------------------------------------------------------------------------------------------------

    async def begin_weights(self) -> None:
        """New weights follow."""
        await self._all("hone_begin_weights")

    async def load_weights(self, parcel: dict[str, Any]) -> None:
        """Take a parcel."""
        await self._all("hone_load_weights", parcel=json.dumps(parcel))

    async def finish_weights(self) -> None:
        """Make what is derived of the weights anew, and forget what was computed with the old ones."""
        await self._all("hone_finish_weights")

    async def _all(self, method: str, **fields: str) -> None:
        """Call a method of every scheduler (:class:`hone.generation.server.sglang_worker.HoneScheduler`).

        Raises:
            GenerationError: it failed.
        """
        async with self._asking:
            try:
                await asyncio.to_thread(self._engine.collective_rpc, method, **fields)
            except AssertionError as error:
                raise GenerationError(first_lines(error)) from error

    def stats(self) -> dict[str, Any]:
        """Counters since start."""
        return dict(self._stats)

    def close(self) -> None:
        """End SGLang's processes."""
        self._engine.shutdown()


def _name(request_id: str) -> str:
    """A name that begins no other name: SGLang aborts by the beginnings of names."""
    return f"{request_id}."


def _sampling(request: GenerationRequest) -> dict[str, Any]:
    """The request's sampling in SGLang's words.

    Raises:
        GenerationError: it is one that SGLang has another meaning for.
    """
    asked = request.sampling
    if asked.repetition_penalty != 1:
        raise GenerationError(
            f"SGLang cannot serve repetition_penalty={asked.repetition_penalty:g}",
            why="it penalises only tokens of the answer, and the other engines those of the prompt too",
            fix="actor_rollout_ref.rollout.repetition_penalty=1, or rollout.name=native or vllm",
        )
    return {
        "max_new_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "sampling_seed": (request.seed + 2**63) % 2**64 - 2**63,
        "ignore_eos": asked.ignore_eos,
        "stop_token_ids": list(asked.stop_token_ids),
        "stop": list(asked.stop),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
