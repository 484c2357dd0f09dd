"""Parts that measure speed and memory: decode steps and updates, each beside the same work done by transformers."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from gpu_simulation.passes import Group, batch_of, needed_operations
from roofline import CHECKPOINTED, long_tailed, record, update_kernels
from torch import nn

from gpu_check.measuring import (
    config_of,
    engine_of,
    on_device,
    prompts_of,
    release,
    rows_of,
    seconds_of,
    serve,
)
from gpu_check.operators import COPY
from gpu_check.results import Result
from hone.config.actor import ActorConfig
from hone.config.model import ModelConfig, OptimConfig
from hone.errors import ConfigError
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.models.heads import PolicyHead
from hone.models.loading import as_policy
from hone.preflight.plan.devices import MATMUL_SHARE, device_named
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import DIVISORS, PartialLoss, PolicyObjective

SAMPLES = 8
"""Responses of a prompt."""


def decode(result: Result) -> None:
    """Measure pure decode steps of 0.6B, 4B and 8B: tokens a second, over the bytes they must read, beside `generate`.

    A step's time is the difference of two lengths, so that prompts and captures do not count.
    """
    short, long = (8, 16) if result.small else (8, 72)
    prompt = 16 if result.small else 512
    for size in ("0.6B",) if result.small else ("0.6B", "4B", "8B"):
        release(result)
        config = config_of(result, size)
        model = _served(on_device(result, config, torch.bfloat16).eval())
        matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
        native = engine_of(result, model, "bfloat16", 8 if result.small else 256, prompt + long)
        for rows in (8,) if result.small else (1, 8, 64, 256):
            prompts = [
                ids for ids in prompts_of(-(-rows // SAMPLES), prompt, config.vocab_size) for _ in range(SAMPLES)
            ]
            first, step = _step_seconds(result, native, prompts[:rows], short, long)
            entry = 4 * config.num_hidden_layers * int(config.num_key_value_heads or 0) * config.head_dim
            moved = 2 * matrices + entry * rows * (prompt + (short + long) / 2)
            result.add(f"{size}, {rows} rows: tokens a second", rows / step)
            result.add(f"{size}, {rows} rows: bytes a second", moved / step / 1e9, "GB/s", of=COPY)
            result.add(f"{size}, {rows} rows: seconds of prompts, captures and {short} steps", first, "s")
        kind, graphs = type(rows_of(native)).__name__, getattr(rows_of(native), "graphs", 0)
        result.notes.append(f"{size}: rows are {kind}, {graphs} graphs")
        native.close()
        del native, model
    release(result)
    for size in () if result.small else ("0.6B", "8B"):
        plain = on_device(result, config_of(result, size), torch.bfloat16).eval()
        for rows in (8, 64):
            seconds = _generate_seconds(
                result, plain, torch.tensor(prompts_of(rows, prompt, 151936), device=result.device)
            )
            result.add(f"transformers, {size}, {rows} rows: tokens a second", rows / seconds)
        del plain
        release(result)


def _step_seconds(result: Result, native: Any, prompts: list[list[int]], short: int, long: int) -> tuple[float, float]:
    """Return the seconds of a run with ``short`` tokens a row, and of one step."""

    def run(tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        serve(native, [GenerationRequest(str(i), ids, sampling, seed=i) for i, ids in enumerate(prompts)])

    run(short)
    first = seconds_of(result, lambda: run(short))
    return first, (seconds_of(result, lambda: run(long)) - first) / (long - short)


def _generate_seconds(result: Result, model: Any, ids: torch.Tensor) -> float:
    """Return the seconds of one step of `generate`."""

    def run(tokens: int) -> None:
        with torch.no_grad():
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=tokens,
                           min_new_tokens=tokens, eos_token_id=None, pad_token_id=0)  # fmt: skip

    run(4)
    return (seconds_of(result, lambda: run(36)) - seconds_of(result, lambda: run(4))) / 32


def _served(model: nn.Module) -> nn.Module:
    """Hold embeddings and norms in float32, matrices in bfloat16, so that 8B with its cache fits into 80 GB."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) or "Norm" in type(module).__name__:
            module.float()
    return model


# updates ------------------------------------------------------------------------------------------------------------------

PEER = {
    "0.6B, full": "full RL of 16,384 tokens: 11,896 tokens/s, 11.1 %",
    "0.6B, LoRA": "LoRA RL of 16,384 tokens: 13,342 tokens/s, 10.9 %",
    "0.6B, SFT": "SFT of 8,192 tokens: 26,005 tokens/s, 16.8 %",
    "4B, LoRA": "LoRA RL of 16,384 tokens: 5,952 tokens/s, 20.7 %; of 65,536: 4,164, 37.4 %",
}
"""What another trainer publishes for one H100: tokens a second of an update and MFU. Not measured here."""


def updates(result: Result) -> None:
    """Measure updates: tokens a second, MFU, time over the roofline's, peak memory, and a plain step on the same tokens."""
    device = None
    if not result.small:
        name = torch.cuda.get_device_name().replace("NVIDIA", "").split()[0]
        try:
            device = device_named(name)
        except ConfigError:
            result.notes.append(f"no stated rates of {name}: MFU is left out")
    cases = [
        ("0.6B", "nothing", 0),
        ("0.6B", "nothing", 8),
        ("4B", "nothing", 0),
        ("4B", "attention", 0),
        ("4B", "nothing", 8),
        ("8B", "nothing", 8),
    ]
    for size, keeps, rank in cases[:1] if result.small else cases:
        config, checkpointed = config_of(result, size), size in CHECKPOINTED
        groups = long_tailed(1, mean=32, longest=64) if result.small else long_tailed(2 if size == "0.6B" else 1)
        name = f"{size}, {'LoRA' if rank else 'full'}" + (", attention kept" if keeps != "nothing" else "")
        release(result)
        try:
            model = on_device(result, config, torch.bfloat16 if rank else torch.float32)
            settings = ModelConfig(
                lora_rank=rank, enable_gradient_checkpointing=checkpointed, gradient_checkpointing_keeps=keeps
            )
            taken = _update_seconds(result, as_policy(model, settings, seed=0, trainable=True), groups)
        except torch.OutOfMemoryError as error:
            result.notes.append(f"{name}: does not fit: {str(error).splitlines()[0]}")
            model = None
            continue
        tokens = sum(group.prompt + sum(group.responses) for group in groups)
        result.add(f"{name}: tokens a second of an update of {tokens} tokens", tokens / taken)
        if not result.small:
            result.add(f"{name}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        if device is not None:
            needed = needed_operations(config, groups) * (2 if rank else 3)  # frozen matrices have no gradient
            result.add(f"{name}: MFU", needed / taken / (device.narrow_rate / MATMUL_SHARE))
            if not rank:
                batch = batch_of(groups)
                predicted = record(size, lambda model, batch=batch: update_kernels(model, batch, bf16=True), keeps)
                result.add(
                    f"{name}: time over the roofline's", taken / predicted.seconds(device, config.num_hidden_layers)
                )
        if name in PEER:
            result.notes.append(f"{name}: a peer publishes {PEER[name]}")
        model = None
        if keeps == "nothing" and not rank and size != "8B":
            _plain(result, size, name, groups, checkpointed=checkpointed)


def _update_seconds(result: Result, model: Any, groups: list[Group]) -> float:
    """Return the median seconds of three updates of the policy, entropy and optimizer's step included."""
    settings = TrainSettings(torch.device(result.device), OptimConfig(lr=1e-6), "bfloat16", total_steps=10)
    backend, actor, batch = (
        LocalBackend(model, PolicyHead(learns_entropy=False), settings),
        ActorConfig(),
        batch_of(groups),
    )
    objective = PolicyObjective(actor, {"bypass_mode": False}, max_response_length=8192)

    def update(step: int) -> None:
        backend.begin_update()
        loss = PartialLoss(objective, DIVISORS[actor.loss_agg_mode])
        backend.accumulate(batch, loss, with_entropy=True)
        backend.apply_gradients(step, loss)

    return statistics.median([seconds_of(result, lambda step=step: update(step)) for step in range(4)][1:])


def _plain(result: Result, size: str, name: str, groups: list[Group], *, checkpointed: bool) -> None:
    """Measure a step of transformers on the same sequences: padded, sdpa, autocast, AdamW; a micro-batch of 4 rows at a time."""
    release(result)
    rows = [group.prompt + response for group in groups for response in group.responses]
    try:
        model = on_device(result, config_of(result, size))
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=not result.small)

        def step() -> None:
            for start in range(0, len(rows), 4):
                lengths = torch.tensor(rows[start : start + 4])
                ids = torch.randint(1, 500, (len(lengths), int(lengths.max())), device=result.device)
                mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).to(result.device)
                labels = ids.masked_fill(~mask, -100)
                with torch.autocast(result.device, torch.bfloat16):
                    loss = model(input_ids=ids, attention_mask=mask.long(), labels=labels).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        seconds = statistics.median([seconds_of(result, step) for _ in range(3)][1:])
    except torch.OutOfMemoryError as error:
        result.notes.append(f"{name}: a plain step does not fit: {str(error).splitlines()[0]}")
        return
    tokens = sum(group.prompt + sum(group.responses) for group in groups)
    result.add(f"{name}: tokens a second of a plain step of transformers", tokens / seconds)
