"""The part that sends weights to an engine in a process of its own: exact arrival, and how fast."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gpu_check.programs import task
from gpu_check.results import Result
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.generation.remote import LaunchPlan, ServedEngine
from hone.models.devices import use_expandable_segments


def weights(result: Result) -> None:
    """Send a model to a native engine on the same GPU by two transports, check what it samples, and time it."""
    folder, device = Path(tempfile.mkdtemp(prefix="gpu_check_")), torch.device(result.device)
    task(result, folder, rows=64, size="5m" if result.small else "600m")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    model.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)  # other weights than the engine begins with
    sent, answers = [(name, parameter.detach()) for name, parameter in model.named_parameters()], {}
    moved = sum(tensor.nbytes for _, tensor in sent)
    use_expandable_segments(device)  # as in a trainer
    for backend in ("shared_memory", "auto"):
        launch = LaunchPlan("native", sys.executable, str(folder / "model"), str(folder / "model"), "bfloat16", max_num_seqs=8,
                            max_model_len=128, log=folder / f"{backend}.log")  # fmt: skip
        began = time.perf_counter()
        engine = ServedEngine.start(launch, backend=backend)
        result.add(f"{backend}: seconds until the engine serves", time.perf_counter() - began, "s")
        try:
            seconds = [_seconds_to_load(engine, sent, version) for version in range(1, 5)]
            answers[backend] = asyncio.run(_sampled(engine))
            stats = engine.describe().stats
        finally:
            engine.close()
        result.add(f"{backend} ({stats['transport']}): first version", seconds[0], "s")
        result.add(f"{backend} ({stats['transport']})", moved / min(seconds[1:]) / 1e9, "GB/s")
        if backend == "auto" and not result.small:
            share = stats["weights_on_gpu_bytes"] / (4 * moved)
            result.add("auto: share of the weights that stayed on the GPU", share, least=1.0)
            result.notes += [stats["transport_obstacle"]] if "transport_obstacle" in stats else []
    result.add("tokens that differ between the transports", int(answers["auto"] != answers["shared_memory"]), most=0)


def _seconds_to_load(engine: ServedEngine, sent: Sequence[tuple[str, torch.Tensor]], version: int) -> float:
    begun = time.perf_counter()
    asyncio.run(engine.load_weights(sent, version))
    return time.perf_counter() - begun


async def _sampled(engine: ServedEngine) -> list[int]:
    """Return the greedy tokens of one prompt."""
    request = GenerationRequest("0", [3, 5, 7, 9], SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True))
    return [token async for completion in engine.generate([request]) for token in completion.token_ids]
