"""The parts that measure weights on their way to an engine in a process of its own."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gpu_check.commands import check_run, data_keys, hone, small_task
from gpu_check.results import Result
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.generation.remote import LaunchPlan, ServedEngine
from hone.models.devices import use_expandable_segments


def weights(result: Result, folder: Path) -> None:
    """Time the weight sync to a native engine in another process of the same device, by turns and asynchronously."""
    size = "5m" if result.device == "cpu" else "600m"
    task = small_task(folder, rows=256)
    hone("init", "--arch", "qwen3", "--size", size, "--tokenizer", task / "tokenizer", "--out", folder / "large")
    common = [f"actor_rollout_ref.model.path={folder}/large", *data_keys(task), f"trainer.device={result.device}",
              "data.max_prompt_length=64", "data.max_response_length=32", "data.train_batch_size=4",
              "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4",
              f"actor_rollout_ref.actor.dtype={'float32' if result.device == 'cpu' else 'bfloat16'}", "trainer.total_training_steps=3", "trainer.test_freq=-1"]  # fmt: skip
    for name, keys in {"by turns": [], "one update old": ["trainer.async.max_staleness=1"]}.items():
        run = folder / name.replace(" ", "_")
        hone("train", "--preset", "grpo", *common, *keys, "actor_rollout_ref.rollout.num_replicas=1",
             f"trainer.default_local_dir={run}")  # fmt: skip
        rows = check_run(result, name, run, 3)
        result.add(
            f"{name}: seconds of a weight sync",
            min(row["timing_s/update_weights"] for row in rows if "timing_s/update_weights" in row),
            "s",
        )
        if result.device == "cuda":
            on_gpu = sum(row.get("replica/0/weights_on_gpu_mb", 0.0) for row in rows)
            result.add(f"{name}: weights that stayed on the GPU", on_gpu, "MiB", least=1.0)


def ipc(result: Result, folder: Path) -> None:
    """IPC weights: send a model to a native engine on the same GPU by every transport, check what it samples, and time it."""
    device = torch.device(result.device)
    task = small_task(folder, rows=4)
    size = "5m" if result.device == "cpu" else "600m"
    hone("init", "--arch", "qwen3", "--size", size, "--tokenizer", task / "tokenizer", "--out", folder / "large")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "large", dtype=torch.bfloat16)
    model.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)  # other weights than the engine begins with
    weights, answers = [(name, parameter.detach()) for name, parameter in model.named_parameters()], {}
    moved = sum(tensor.nbytes for _, tensor in weights)
    if result.device == "cuda":
        use_expandable_segments(device)  # as in a trainer
    for backend in ("file", "shared_memory", "auto"):
        launch = LaunchPlan("native", sys.executable, str(folder / "large"), str(folder / "large"), "bfloat16", max_num_seqs=8,
                            max_model_len=128, log=folder / f"{backend}.log")  # fmt: skip
        engine = ServedEngine.start(launch, backend=backend)
        try:
            seconds = [_seconds_to_load(engine, weights, version) for version in range(1, 5)]
            answers[backend] = asyncio.run(_sampled(engine))
            stats = engine.describe().stats
        finally:
            engine.close()
        rate = moved / min(seconds[1:])  # the first maps the buffers
        result.add(f"{backend} ({stats['transport']}): first version", seconds[0], "s")
        result.add(f"{backend} ({stats['transport']})", rate / 1e9, "GB/s")
        result.add(f"{backend}: seconds for 8 billion parameters in bfloat16, by bytes", 16e9 / rate, "s")
        result.add(
            f"{backend}: tokens other than those after the file transport",
            int(answers[backend] != answers["file"]),
            most=0,
        )
        if backend == "auto" and result.device == "cuda":
            result.add(
                "auto: share of the weights that stayed on the GPU",
                stats["weights_on_gpu_bytes"] / (4 * moved),
                least=1.0,
            )
            result.notes += [stats["transport_obstacle"]] if "transport_obstacle" in stats else []


def _seconds_to_load(engine: ServedEngine, weights: Sequence[tuple[str, torch.Tensor]], version: int) -> float:
    begun = time.perf_counter()
    asyncio.run(engine.load_weights(weights, version))
    return time.perf_counter() - begun


async def _sampled(engine: ServedEngine) -> list[int]:
    """Return the greedy tokens of one prompt."""
    request = GenerationRequest("0", [3, 5, 7, 9], SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True))
    return [token async for completion in engine.generate([request]) for token in completion.token_ids]
