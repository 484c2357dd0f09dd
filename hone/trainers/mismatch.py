"""`hone engines mismatch`: how far an engine's log-probs are from the trainer's, before anything is trained."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
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
from hone.insight.engine_gap import THRESHOLDS, Verdict, judge
from hone.training.engine import TrainEngine
from hone.training.heads import PolicyHead
from hone.training.model import load_policy

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
    """What is measured; the attributes are the command's options."""

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
    """What was found.

    Attributes:
        request: what was measured.
        tokens: sampled tokens that were compared.
        metrics: by name, as a training run reports them.
        verdict: what they mean.
        reasons: what led to it.
    """

    request: MismatchRequest
    tokens: int
    metrics: dict[str, float]
    verdict: Verdict
    reasons: list[str]


def measure(request: MismatchRequest) -> Mismatch:
    """Let the engine sample answers, and the trainer say how likely it finds them.

    Raises:
        HoneError: the model cannot be loaded, or the engine cannot serve it.
    """
    if request.temperature <= 0:
        raise ConfigError("temperature 0 samples only the likeliest tokens", fix="--temperature 1")
    device, tokenizer = prepare_torch(RunConfig()), load_tokenizer(request.model)
    model = load_policy(ModelConfig(path=request.model), device=device, seed=0, trainable=False)
    prompts = [_prompt(tokenizer, QUESTIONS[number % len(QUESTIONS)]) for number in range(request.samples)]
    longest = max(map(len, prompts)) + request.tokens
    engine = _engine(request, model, tokenizer, device, longest)
    try:
        completions = asyncio.run(_sample(engine, prompts, request))
    finally:
        engine.close()
    dtype = request.trainer_dtype or request.dtype
    trainer = TrainEngine(model, PolicyHead(request.temperature), device=device, dtype=dtype)
    return compare(request, trainer, prompts, completions)


def compare(
    request: MismatchRequest, trainer: TrainEngine, prompts: list[list[int]], completions: list[Completion]
) -> Mismatch:
    """Compare what the engine reported with what the trainer computes."""
    response = _column([completion.token_ids for completion in completions], torch.int64)
    mask = response.with_values(torch.ones_like(response.values))
    batch = Batch({"prompt_ids": _column(prompts, torch.int64), "response_ids": response, "response_mask": mask})
    theirs = _column([completion.log_probs for completion in completions], torch.float32)
    ours = trainer.infer_batch(batch)["log_probs"]
    metrics = {
        name: float(value)
        for name, value in off_policy_metrics(ours.to_padded(), theirs.to_padded(), mask.to_padded()).items()
    }
    for name, gap in (("probs", ours.values.exp() - theirs.values.exp()), ("log_probs", ours.values - theirs.values)):
        metrics[f"training/rollout_{name}_diff_mean"] = float(gap.abs().mean())
        metrics[f"training/rollout_{name}_diff_max"] = float(gap.abs().max())
    verdict, reasons = judge(metrics)
    return Mismatch(request, len(mask.values), metrics, verdict, reasons)


def report(found: Mismatch, *, as_json: bool) -> None:
    """Print what was found."""
    request = found.request
    if as_json:
        result = {"verdict": found.verdict.value, "reasons": found.reasons, "tokens": found.tokens, **vars(request)}
        sys.stdout.write(json.dumps({**result, "metrics": found.metrics}) + "\n")
        return
    looks = {threshold.metric: threshold for threshold in THRESHOLDS}
    table = Table("metric", "value", "look from", "act from")
    for name in (
        *looks,
        "training/rollout_log_probs_diff_max",
        "rollout_corr/log_ratio_q01",
        "rollout_corr/log_ratio_q99",
    ):
        limits = looks.get(name)
        table.add_row(
            name,
            f"{found.metrics[name]:.3g}",
            f"{limits.look:g}" if limits else "",
            f"{limits.act:g}" if limits else "",
        )
    console = Console()
    console.print(table)
    trainer = request.trainer_dtype or request.dtype
    console.print(
        f"{request.model}: {request.engine} in {request.dtype} against the trainer in {trainer}, "
        f"{found.tokens} tokens: {found.verdict.value.upper()}",
        highlight=False,
    )
    for reason in found.reasons:
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
    longest: int,
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
            max_model_len=longest,
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
        max_model_len=longest,
    )


async def _sample(engine: Engine, prompts: list[list[int]], request: MismatchRequest) -> list[Completion]:
    sampling = SamplingParams(max_tokens=request.tokens, temperature=request.temperature, ignore_eos=True)
    requests = [
        GenerationRequest(str(number), prompt, sampling, derive_seed(request.seed, "mismatch", number))
        for number, prompt in enumerate(prompts)
    ]
    found = {completion.request_id: completion async for completion in engine.generate(requests)}
    return [found[asked.request_id] for asked in requests]


def _column(rows: list[list[int]] | list[list[float]], dtype: torch.dtype) -> Ragged:
    values = torch.tensor([value for row in rows for value in row], dtype=dtype)
    return Ragged.from_lengths(values, torch.tensor([len(row) for row in rows]))
