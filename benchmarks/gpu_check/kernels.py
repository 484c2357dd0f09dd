"""Parts that measure Hone's own passes in this process: updates, decoding, and the engine against a reference."""

from __future__ import annotations

import asyncio
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from roofline import CHECKPOINTED, SIZES, long_tailed, qwen3, record, update_kernels
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Qwen3Config

from gpu_check.results import Result
from hone.config.actor import ActorConfig
from hone.config.model import ModelConfig, OptimConfig
from hone.errors import ConfigError
from hone.generation import ENGINES
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.models.heads import PolicyHead
from hone.models.loading import prepare
from hone.models.routing import use_hone_attention
from hone.preflight.plan.devices import MATMUL_SHARE, Device, device_named
from hone.preflight.plan.roofline.passes import batch_of, needed_operations
from hone.training.backends.local.backend import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import DIVISORS, PolicyObjective
from hone.training.updates import PartialLoss

TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def config_of(result: Result, size: str) -> Qwen3Config:
    """Return the configuration of a Qwen3, or of a tiny one on a CPU."""
    if result.device != "cpu":
        return qwen3(size)
    return Qwen3Config(vocab_size=512, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, **TINY)


def on_device(result: Result, config: Qwen3Config, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with random weights."""
    torch.manual_seed(0)
    with torch.device(result.device):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa")


def wait(result: Result) -> None:
    """Wait for the device's queued work."""
    if result.device != "cpu":
        torch.cuda.synchronize()


def release(result: Result) -> None:
    """Free what earlier sizes held, and begin a new peak of memory."""
    gc.collect()
    if result.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def known_device(result: Result) -> Device | None:
    """Return the numbers of this GPU, or None if its name is not in the table."""
    if result.device == "cpu":
        return None
    name = torch.cuda.get_device_name().replace("NVIDIA", "").split()[0]
    try:
        return device_named(name)
    except ConfigError:
        result.notes.append(f"no stated rates of {torch.cuda.get_device_name()}: MFU is left out")
        return None


def _updated(result: Result) -> Iterator[tuple[str, str]]:
    """Yield the sizes with what gradient checkpointing keeps; models without checkpointing come once."""
    for size in SIZES if result.device != "cpu" else ["0.6B"]:
        yield size, "nothing"
        if size in CHECKPOINTED:
            yield size, "attention"


def updates(result: Result, folder: Path) -> None:
    """Measure updates of Qwen3 0.6B to 8B with random weights: tokens a second, MFU, peak memory, and the prediction."""
    del folder
    device = known_device(result)
    for size, keeps in _updated(result):
        config, checkpointing = config_of(result, size), size in CHECKPOINTED
        name = size if keeps == "nothing" else f"{size}, {keeps} kept"
        groups = long_tailed(2) if result.device != "cpu" else long_tailed(1, mean=32, longest=64)
        batch, needed = batch_of(groups), needed_operations(config, groups)
        tokens = sum(group.prompt + sum(group.responses) for group in groups)
        release(result)
        try:
            model = on_device(result, config)
            memory = {"enable_gradient_checkpointing": checkpointing, "gradient_checkpointing_keeps": keeps}
            prepare(model, ModelConfig(**memory))
            settings = TrainSettings(torch.device(result.device), OptimConfig(lr=1e-6), "bfloat16", total_steps=10)
            backend, actor = LocalBackend(model, PolicyHead(learns_entropy=False), settings), ActorConfig()
            objective = PolicyObjective(actor, {"bypass_mode": False}, max_response_length=8192)
            seconds = []
            for step in range(4):
                wait(result)
                began = time.perf_counter()
                backend.begin_update()
                loss = PartialLoss(objective, DIVISORS[actor.loss_agg_mode])
                backend.accumulate(batch, loss, with_entropy=True)
                backend.apply_gradients(step, loss)
                wait(result)
                seconds.append(time.perf_counter() - began)
        except torch.OutOfMemoryError as error:
            result.notes.append(f"{name}: does not fit: {str(error).splitlines()[0]}")
            model = backend = None
            continue
        taken = statistics.median(seconds[1:])
        result.add(f"{name}: tokens per second of an update", tokens / taken)
        if result.device != "cpu":
            result.add(f"{name}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        if device is not None:
            result.add(f"{name}: MFU", 3 * needed / taken / (device.narrow_rate / MATMUL_SHARE))
            predicted = record(size, lambda model, batch=batch: update_kernels(model, batch, bf16=True), keeps)
            result.add(
                f"{name}: measured over predicted seconds", taken / predicted.seconds(device, config.num_hidden_layers)
            )
        model = backend = None


def engine_of(result: Result, model: Any, dtype: str, rows: int, longest: int) -> Any:
    """Return a native engine over a model with Hone's attention."""
    use_hone_attention(model)
    return ENGINES.get("native")(
        model=model, tokenizer=PreTrainedTokenizerBase(), device=torch.device(result.device), dtype=dtype,
        max_num_seqs=rows, max_cache_tokens=rows * longest, max_model_len=longest,
    )  # fmt: skip


def serve(engine: Any, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """Return the completions in the order of the requests."""

    async def all_of_them() -> list[Completion]:
        return [completion async for completion in engine.generate(requests)]

    order = {request.request_id: place for place, request in enumerate(requests)}
    return sorted(asyncio.run(all_of_them()), key=lambda completion: order[completion.request_id])


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return random prompts, the same in each call."""
    return torch.randint(1, vocabulary, (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def engine(result: Result, folder: Path) -> None:
    """Hold the native engine against transformers and against float64: greedy tokens, log-probs, and groups against rows alone."""
    del folder
    config = Qwen3Config(
        vocab_size=512, num_key_value_heads=2, head_dim=64, **{**TINY, "hidden_size": 256, "num_hidden_layers": 4}
    )
    reference = on_device(result, config).double().cpu().eval()
    prompts = prompts_of(8, 48, 512)
    greedy = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    sampled = SamplingParams(max_tokens=32, ignore_eos=True)
    for dtype, most in (("float32", 1e-4), ("bfloat16", 0.2)):
        native = engine_of(result, on_device(result, config), dtype, 32, 96)
        requests = [
            GenerationRequest(f"{row}.{n}", ids, sampled, seed=8 * row + n)
            for row, ids in enumerate(prompts)
            for n in range(4)
        ]
        together = serve(native, requests)
        gaps = [_gap(reference, request.prompt_ids, answer) for request, answer in zip(requests, together, strict=True)]
        result.add(f"{dtype}: log-probs against float64, largest", max(map(max, gaps)), most=most)
        result.add(f"{dtype}: log-probs against float64, mean", statistics.mean(map(statistics.mean, gaps)))
        alone = [serve(native, [request])[0] for request in requests[:4]]
        same = sum(one.token_ids == other.token_ids for one, other in zip(alone, together[:4], strict=True))
        result.add(f"{dtype}: responses equal alone and together, of 4", same, least=4 if dtype == "float32" else None)
        if dtype == "float32":
            answers = serve(native, [GenerationRequest(str(row), ids, greedy) for row, ids in enumerate(prompts)])
            theirs = _greedy(reference, prompts, 32)
            same = sum(answer.token_ids == expected for answer, expected in zip(answers, theirs, strict=True))
            result.add("float32: greedy responses equal to float64 transformers, of 8", same, least=8)
        native.close()


def _gap(reference: Any, prompt: list[int], answer: Completion) -> list[float]:
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.no_grad():
        scores = reference(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = scores.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    return (expected - torch.tensor(answer.log_probs, dtype=torch.float64)).abs().tolist()


def _greedy(reference: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
                             eos_token_id=None, pad_token_id=0)  # fmt: skip
    return out[:, ids.shape[1] :].tolist()


def decoding(result: Result, folder: Path) -> None:
    """Measure decoded tokens a second at 8 to 256 rows, against transformers."""
    del folder
    on_cpu = result.device == "cpu"
    config, prompt, tokens = config_of(result, "0.6B"), 16 if on_cpu else 512, 8 if on_cpu else 128
    plain, ours = on_device(result, config, torch.bfloat16).eval(), on_device(result, config)
    native = engine_of(result, ours, "bfloat16", 256, prompt + tokens)
    requests: list[GenerationRequest] = []
    for rows in (8,) if on_cpu else (8, 32, 64, 128, 256):
        prompts = prompts_of(-(-rows // 8), prompt, config.vocab_size)
        prompts = [ids for ids in prompts for _ in range(8)]
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        requests = [GenerationRequest(str(row), ids, sampling, seed=row) for row, ids in enumerate(prompts)]
        speed = rows * tokens / _seconds(result, lambda requests=requests: serve(native, requests))
        result.add(f"{rows} rows: native tokens per second", speed)
        ids = torch.tensor(prompts, device=result.device)
        try:
            theirs = rows * tokens / _seconds(result, lambda ids=ids: _sampled(plain, ids, tokens))
        except torch.OutOfMemoryError:
            result.notes.append(f"{rows} rows: transformers runs out of memory")
            continue
        result.add(f"{rows} rows: native over transformers", speed / theirs)
    if not on_cpu:
        before = torch.cuda.memory_allocated()
        asyncio.run(native.sleep())
        release(result)
        result.add("sleep of the native engine frees", (before - torch.cuda.memory_allocated()) / 2**30, "GiB")
        asyncio.run(native.wake())
        result.add("completions after wake", len(serve(native, requests[:8])), least=8)
    native.close()


def _sampled(model: Any, ids: torch.Tensor, tokens: int) -> None:
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=tokens,
                       min_new_tokens=tokens, eos_token_id=None, pad_token_id=0)  # fmt: skip


def _seconds(result: Result, run: Callable[[], Any]) -> float:
    """Return the shorter of two runs after a warm-up."""
    taken = []
    for _ in range(3):
        wait(result)
        began = time.perf_counter()
        run()
        wait(result)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])
