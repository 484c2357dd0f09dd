"""Hone's own passes on a simulated GPU: the update of a mini-batch, its log-probs, and a decode step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from gpu_simulation.kernels import Kernel
from gpu_simulation.simulation import META, Recorder, simulated_gpu
from hone.config.actor import ActorConfig
from hone.config.model import ModelConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.generation.native.contiguous import ContiguousRows
from hone.generation.native.paged.rows import PagedRows
from hone.generation.native.rows import CacheLimits, RowStore
from hone.generation.native.runner import Runner
from hone.generation.native.scheduler import Job, Sampled
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.models.heads import PolicyHead
from hone.models.loading import prepare
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import DIVISORS, PartialLoss, PolicyObjective

_TENSORS_A_LAUNCH = 24
"""Parameters that one launch of a fused multi-tensor kernel handles."""


class Group(NamedTuple):
    """A prompt with its responses, in tokens."""

    prompt: int
    responses: Sequence[int]


def model_without_storage(config: PreTrainedConfig, *, checkpointing: bool = False, keeps: str = "nothing") -> Any:
    """Return a float32 model on the meta device, prepared for training as Hone does.

    Args:
        config: of the model.
        checkpointing: whether gradient checkpointing is on.
        keeps: what it keeps, see ``model.gradient_checkpointing_keeps``.
    """
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    settings = ModelConfig(enable_gradient_checkpointing=checkpointing, gradient_checkpointing_keeps=keeps)
    prepare(model, settings)
    return model


def batch_of(groups: Sequence[Group]) -> Batch:
    """Return a batch with these lengths and arbitrary tokens."""
    rows = [(number, group.prompt, length) for number, group in enumerate(groups) for length in group.responses]

    def column(value: float, dtype: torch.dtype) -> Ragged:
        return Ragged.from_rows([[value] * length for _, _, length in rows], dtype)

    prompts = [[number + 1, *[0] * (prompt - 1)] for number, prompt, _ in rows]
    responses = [
        [place + 1, *[0] * (length - 1)] for place, (_, _, length) in enumerate(rows)
    ]  # they share prompts alone
    floats = {name: column(0.1, torch.float32) for name in ("advantages", "old_log_probs")}
    return Batch(
        {
            "prompt_ids": Ragged.from_rows(prompts, torch.int64),
            "response_ids": Ragged.from_rows(responses, torch.int64),
            "response_mask": column(1, torch.int64),
            **floats,
        }
    )


def update_kernels(model: nn.Module, batch: Batch, *, bf16: bool, max_tokens: int = 16384) -> list[Kernel]:
    """Return the kernels of the forward and backward passes of a GRPO update, without the optimizer."""
    backend, actor = _backend(model, bf16, max_tokens), ActorConfig()
    objective = PolicyObjective(actor, {"bypass_mode": False}, max_response_length=8192)
    with simulated_gpu() as gpu:
        loss = PartialLoss(objective, DIVISORS[actor.loss_agg_mode])
        with _recomputed_under_autocast(model, gpu):
            backend.accumulate(batch, loss, with_entropy=True)
        model.zero_grad()
        return gpu.take()


@contextlib.contextmanager
def _recomputed_under_autocast(model: nn.Module, gpu: Recorder) -> Iterator[None]:
    """Let gradient checkpointing restore autocast in the backward pass, as it does on devices that torch has autocast for."""
    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
    originals = [layer._gradient_checkpointing_func for layer in layers]
    for layer, original in zip(layers, originals, strict=True):
        layer._gradient_checkpointing_func = lambda function, *args, _original=original, **kwargs: _original(
            gpu.in_this_precision(function), *args, **kwargs
        )
    try:
        yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            layer._gradient_checkpointing_func = original


def optimizer_kernels(model: nn.Module) -> list[Kernel]:
    """Return the kernels of clipping and a fused AdamW step, in closed form: the meta device has neither.

    The norm reads the gradients, and clipping reads and writes them. AdamW reads weight, gradient and two moments, and writes all
    but the gradient.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size, launches = 4.0 * sum(parameter.numel() for parameter in trained), -(-len(trained) // _TENSORS_A_LAUNCH)
    passes = {"gradient norm": 1, "clip gradients": 2, "fused AdamW": 7}
    kernels = [Kernel(name, "optimizer", count * size, launches=launches) for name, count in passes.items()]
    return [kernels[0], Kernel("_local_scalar_dense", "optimizer", launches=0, waits=True), *kernels[1:]]


def log_prob_kernels(model: nn.Module, batch: Batch, *, bf16: bool, max_tokens: int = 16384) -> list[Kernel]:
    """Return the kernels of a pass that computes the log-probs of a batch."""
    backend = _backend(model, bf16, max_tokens)
    with simulated_gpu() as gpu:
        backend.infer_batch(batch)
        return gpu.take()


def decode_kernels(model: nn.Module, groups: Sequence[Group], *, bf16: bool) -> list[Kernel]:
    """Return the kernels of one decode step of the native engine, in which no row ends: of a CUDA graph where it decodes from pages.

    Args:
        groups: the rows, with the tokens sampled so far.
    """
    in_rows = all(len(group.responses) == 1 for group in groups)  # as the scheduler decides
    longest = max(max(group.responses) for group in groups)
    sampling = SamplingParams(max_tokens=longest + 3)
    jobs, sampled = [], [length for group in groups for length in group.responses]
    for number, group in enumerate(groups):
        prompt = [number + 1, *[0] * (group.prompt - 1)]
        for row in range(len(group.responses)):
            jobs.append(Job.from_request(GenerationRequest(f"{number}.{row}", prompt, sampling), asyncio.Queue()))
            jobs[-1].in_row = in_rows
    limits = CacheLimits(len(jobs), max(group.prompt for group in groups) + sampling.max_tokens)
    with simulated_gpu() as gpu:
        dtype = "bfloat16" if bf16 else "float32"
        runner = Runner(model, cast("Any", None), device=META, dtype=dtype, limits=limits)
        with runner.computing():
            if isinstance(runner.rows, PagedRows):
                for job, length in zip(jobs, sampled, strict=True):
                    job.sampled = Sampled([0] * length, [0.0] * length, [0.0] * length)
            runner.enter(jobs)
            runner.step()  # builds what later steps use again
            paged = isinstance(runner.rows, PagedRows)
            _lengthen(runner.rows, sampled)
            gpu.take()
            runner.step()
        return [replace(kernel, in_graph=paged and not kernel.waits) for kernel in gpu.take()]


def _lengthen(rows: RowStore, sampled: Sequence[int]) -> None:
    """Let rows have sampled this many tokens, in tensors whose values the simulated GPU knows."""
    if isinstance(rows, PagedRows):
        assert rows._memory is not None
        lengths = [len(job.request.prompt_ids) - 1 + length for job, length in zip(rows.running, sampled, strict=True)]
        columns = [lengths, [0] * len(lengths), list(sampled), *[[1 << 20] * len(lengths)] * 4]
        rows._memory.table._integers = torch.tensor(columns, device=META)
    elif isinstance(rows, ContiguousRows):
        assert rows.state is not None
        for job, length in zip(rows.running, sampled, strict=True):
            job.entered = rows.steps - length
        rows._extent_before = None
        state = {"length": [rows.row_tokens(job) for job in rows.running], "generated": sampled}
        rows.state = replace(rows.state, **{name: torch.tensor(values, device=META) for name, values in state.items()})


def _backend(model: nn.Module, bf16: bool, max_tokens: int) -> LocalBackend:
    settings = TrainSettings(META, dtype="bfloat16" if bf16 else "float32", max_tokens=max_tokens)
    return LocalBackend(model, PolicyHead(learns_entropy=False), settings)


def needed_operations(config: PreTrainedConfig, groups: Sequence[Group]) -> float:
    """Return the operations of a forward pass that computes each prompt once, without padding and without masked pairs."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    responses = sum(sum(group.responses) for group in groups)
    tokens = responses + sum(group.prompt for group in groups)
    pairs = sum(
        group.prompt**2 / 2 + sum(length * (group.prompt + length / 2) for length in group.responses)
        for group in groups
    )
    head = config.hidden_size * config.vocab_size * responses
    return 2 * (config.num_hidden_layers * layer * tokens + head) + 4 * pairs * queries * config.num_hidden_layers
