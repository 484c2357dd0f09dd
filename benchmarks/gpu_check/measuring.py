"""Models, engines and clocks that parts of the check share."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numbered_tokenizer import numbered_tokenizer
from roofline import qwen3
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from gpu_check.results import Result
from hone.generation import ENGINES
from hone.generation.protocol import Completion, GenerationRequest
from hone.models.routing import use_hone_attention

TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def config_of(result: Result, size: str) -> Qwen3Config:
    """Return the configuration of a Qwen3, or of a tiny one on a CPU."""
    if not result.small:
        return qwen3(size)
    return Qwen3Config(vocab_size=512, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, **TINY)


def on_device(result: Result, config: Qwen3Config, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(result.device):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa")


def engine_of(result: Result, model: Any, dtype: str, rows: int, longest: int) -> Any:
    """Return a native engine over a model with Hone's attention."""
    use_hone_attention(model)
    return ENGINES.get("native")(
        model=model, tokenizer=numbered_tokenizer(model.config.vocab_size), device=torch.device(result.device), dtype=dtype,
        max_num_seqs=rows, max_cache_tokens=rows * longest, max_model_len=longest, gpu_memory_utilization=0.9,
    )  # fmt: skip


def rows_of(engine: Any) -> Any:
    """Return the rows of a native engine: of pages, or contiguous."""
    return engine._runner.rows


def serve(engine: Any, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """Return the completions in the order of the requests."""

    async def all_of_them() -> list[Completion]:
        return [completion async for completion in engine.generate(requests)]

    order = {request.request_id: place for place, request in enumerate(requests)}
    return sorted(asyncio.run(all_of_them()), key=lambda completion: order[completion.request_id])


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return random prompts, the same in each call."""
    return torch.randint(1, vocabulary, (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the error over that of what is wanted, in float64; infinite if a number is not finite."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm()) if bool(found.isfinite().all()) else math.inf


def wait(result: Result) -> None:
    """Wait for the device's queued work."""
    if not result.small:
        torch.cuda.synchronize()


def release(result: Result) -> None:
    """Free what earlier sizes held, and begin a new peak of memory."""
    gc.collect()
    if not result.small:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds_of(result: Result, run: Callable[[], Any]) -> float:
    """Return the seconds of one run, its device's work included."""
    wait(result)
    began = time.perf_counter()
    run()
    wait(result)
    return time.perf_counter() - began


def device_seconds(result: Result, run: Callable[[], Any], *, least: int = 5, most: float = 0.2) -> float:
    """Return the median seconds of the device, by its events, after three runs that are not counted."""
    if result.small:
        return seconds_of(result, run)
    for _ in range(3):
        run()
    times: list[float] = []
    while len(times) < least or sum(times) < most:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def graph_seconds(result: Result, run: Callable[[], Any], repeats: int = 20) -> float:
    """Return the seconds of one run inside a CUDA graph of many, so that no launch of the host counts."""
    if result.small:
        return seconds_of(result, run)
    run()
    wait(result)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return device_seconds(result, graph.replay, most=0.05) / repeats
