"""Comparison of an engine's log-probs with the trainer's before training (`hone engines mismatch`)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from hone.algorithms import off_policy_metrics
from hone.cluster.context import prepare_torch
from hone.config.model import ModelConfig
from hone.config.run import RunConfig
from hone.data.batch import Batch
from hone.data.chat import render_prompt
from hone.data.ragged import Ragged
from hone.data.seeding import derive_seed
from hone.data.tokenizer import load_tokenizer
from hone.errors import ConfigError
from hone.generation import ENGINES, SERVED
from hone.generation.environments import interpreter_of
from hone.generation.protocol import Completion, Engine, GenerationRequest, SamplingParams
from hone.generation.remote import LaunchPlan, ServedEngine
from hone.models.heads import PolicyHead
from hone.models.loading import load_policy
from hone.training.backends.local import LocalBackend
from hone.training.backends.protocol import TrainBackend
from hone.training.engine import TrainSettings


class Verdict(StrEnum):
    """Consequence of the measured numbers for training."""

    GOOD = "good"
    LOOK = "look"
    """Train with importance correction, and watch the gap."""
    BAD = "bad"
    """Fix it before training: gradients would be of another policy than the one that sampled."""


@dataclass(frozen=True)
class Threshold:
    """Sizes of a metric above which to look, and to act."""

    metric: str
    look: float
    act: float


THRESHOLDS = (
    Threshold("training/rollout_probs_diff_mean", 0.005, 0.01),
    Threshold("training/rollout_log_probs_diff_mean", 0.02, 0.1),
    Threshold("rollout_corr/kl", 0.01, 0.1),
    Threshold("rollout_corr/k3_kl", 0.01, 0.1),
    Threshold("rollout_corr/chi2_token", 0.1, 1.0),
    Threshold("rollout_corr/ratio_outside", 0.001, 0.01),
)


def judge(metrics: Mapping[str, float]) -> tuple[Verdict, list[str]]:
    """Return the verdict over metrics by name, and its reasons in words.

    >>> judge({"training/rollout_probs_diff_mean": 0.002})
    (<Verdict.GOOD: 'good'>, [])
    >>> judge({"rollout_corr/kl": -0.2})
    (<Verdict.BAD: 'bad'>, ['rollout_corr/kl is -0.2; 0.1 or more: act'])
    """
    verdict, reasons = Verdict.GOOD, []
    for threshold in THRESHOLDS:
        value = metrics.get(threshold.metric, 0.0)
        if not abs(value) < threshold.look:  # true for nan too
            act = not abs(value) < threshold.act
            verdict = Verdict.BAD if act or verdict is Verdict.BAD else Verdict.LOOK
            level, name = (threshold.act, "act") if act else (threshold.look, "look")
            reasons.append(f"{threshold.metric} is {value:.3g}; {level:g} or more: {name}")
    return verdict, reasons


QUESTIONS = (
    "What is 17 + 25? Think step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why is the sky blue? Answer in two sentences.",
    "Translate 'good morning' into French, German and Japanese.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel?",
    "List the prime numbers below 50.",
    "Summarise the plot of Hamlet in one paragraph.",
    'Return a JSON object with the keys "name" and "age".',
)


@dataclass(frozen=True)
class MismatchRequest:
    """Request of `hone engines mismatch`; the attributes are its options."""

    model: str
    engine: str = "native"
    dtype: str = "float32"
    trainer_dtype: str | None = None
    samples: int = 32
    tokens: int = 64
    temperature: float = 1.0
    seed: int = 1


@dataclass(frozen=True)
class Mismatch:
    """Result of the comparison."""

    request: MismatchRequest
    tokens: int  # number of compared sampled tokens
    metrics: dict[str, float]  # metrics by name, as in a training run
    verdict: Verdict
    reasons: list[str]


def measure(request: MismatchRequest) -> Mismatch:
    """Sample answers with the engine, and compute their log-probs with the trainer."""
    if request.temperature <= 0:
        raise ConfigError("temperature 0 samples only the most likely tokens", fix="--temperature 1")
    device, tokenizer = prepare_torch(RunConfig()), load_tokenizer(request.model)
    model = load_policy(ModelConfig(path=request.model), device=device, seed=0, trainable=False)
    prompts = [_prompt(tokenizer, QUESTIONS[number % len(QUESTIONS)]) for number in range(request.samples)]
    max_model_len = max(map(len, prompts)) + request.tokens
    engine = _engine(request, model, tokenizer, device, max_model_len)
    try:
        completions = asyncio.run(_sample(engine, prompts, request))
    finally:
        engine.close()
    dtype = request.trainer_dtype or request.dtype
    trainer = LocalBackend(model, PolicyHead(request.temperature), TrainSettings(device, dtype=dtype))
    return compare(request, trainer, prompts, completions)


def compare(
    request: MismatchRequest, trainer: TrainBackend, prompts: list[list[int]], completions: list[Completion]
) -> Mismatch:
    """Compare the engine's log-probs with the trainer's."""
    response = _column([completion.token_ids for completion in completions], torch.int64)
    mask = response.with_values(torch.ones_like(response.values))
    batch = Batch({"prompt_ids": _column(prompts, torch.int64), "response_ids": response, "response_mask": mask})
    engine_log_probs = _column([completion.log_probs for completion in completions], torch.float32)
    trainer_log_probs = trainer.infer_batch(batch)["log_probs"]
    metrics = {
        name: float(value)
        for name, value in off_policy_metrics(
            trainer_log_probs.to_padded(), engine_log_probs.to_padded(), mask.to_padded()
        ).items()
    }
    for name, gap in (
        ("probs", trainer_log_probs.values.exp() - engine_log_probs.values.exp()),
        ("log_probs", trainer_log_probs.values - engine_log_probs.values),
    ):
        metrics[f"training/rollout_{name}_diff_mean"] = float(gap.abs().mean())
        metrics[f"training/rollout_{name}_diff_max"] = float(gap.abs().max())
    verdict, reasons = judge(metrics)
    return Mismatch(request, len(mask.values), metrics, verdict, reasons)


def report(mismatch: Mismatch, *, as_json: bool) -> None:
    """Print the result."""
    request = mismatch.request
    if as_json:
        result = {
            "verdict": mismatch.verdict.value,
            "reasons": mismatch.reasons,
            "compared_tokens": mismatch.tokens,
            **vars(request),
        }
        sys.stdout.write(json.dumps({**result, "metrics": mismatch.metrics}) + "\n")
        return
    thresholds = {threshold.metric: threshold for threshold in THRESHOLDS}
    table = Table("metric", "value", "look from", "act from")
    for name in (
        *thresholds,
        "training/rollout_log_probs_diff_max",
        "rollout_corr/log_ratio_q01",
        "rollout_corr/log_ratio_q99",
    ):
        limits = thresholds.get(name)
        table.add_row(
            name,
            f"{mismatch.metrics[name]:.3g}",
            f"{limits.look:g}" if limits else "",
            f"{limits.act:g}" if limits else "",
        )
    console = Console()
    console.print(table)
    trainer = request.trainer_dtype or request.dtype
    console.print(
        f"{request.model}: {request.engine} in {request.dtype} against the trainer in {trainer}, "
        f"{mismatch.tokens} tokens: {mismatch.verdict.value.upper()}",
        highlight=False,
    )
    for reason in mismatch.reasons:
        console.print(f"  {reason}", highlight=False)


def _prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    if tokenizer.chat_template:
        return render_prompt(tokenizer, [{"role": "user", "content": question}])
    return list(tokenizer.encode(question))


def _engine(
    request: MismatchRequest,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    max_model_len: int,
) -> Engine:
    if request.engine in SERVED:
        path = str(Path(request.model).absolute())
        plan = LaunchPlan(
            engine=request.engine,
            python=str(interpreter_of(request.engine, None)),
            model=path,
            tokenizer=path,
            dtype=request.dtype,
            max_num_seqs=64,
            max_model_len=max_model_len,
            log=Path("engine-mismatch.log"),
        )
        return ServedEngine.start(plan)
    return ENGINES.get(request.engine)(
        model=model,
        tokenizer=tokenizer,
        device=device,
        dtype=request.dtype,
        max_num_seqs=64,
        max_cache_tokens=None,
        max_model_len=max_model_len,
    )


async def _sample(engine: Engine, prompts: list[list[int]], request: MismatchRequest) -> list[Completion]:
    sampling = SamplingParams(max_tokens=request.tokens, temperature=request.temperature, ignore_eos=True)
    requests = [
        GenerationRequest(str(number), prompt, sampling, derive_seed(request.seed, "mismatch", number))
        for number, prompt in enumerate(prompts)
    ]
    completions = {completion.request_id: completion async for completion in engine.generate(requests)}
    return [completions[request.request_id] for request in requests]


def _column(rows: list[list[int]] | list[list[float]], dtype: torch.dtype) -> Ragged:
    values = torch.tensor([value for row in rows for value in row], dtype=dtype)
    return Ragged.from_lengths(values, torch.tensor([len(row) for row in rows]))
