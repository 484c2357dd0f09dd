"""Evaluation of a trained model: on single questions, or on a dataset with scores."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from hone.agents.base import EpisodeContext
from hone.agents.player import Player
from hone.agents.tool_agent import shown_of
from hone.cluster.context import prepare_torch
from hone.config.model import ModelConfig
from hone.config.reward import RewardConfig
from hone.config.run import RunConfig
from hone.data.assistant_mask import end_of_turn
from hone.data.chat import render_prompt
from hone.data.checks.rows import is_missing
from hone.data.image_processor import load_image_processor
from hone.data.prompts import PromptDataset
from hone.data.seeding import derive_seed
from hone.data.tokenizer import load_tokenizer, stop_tokens
from hone.data.types import Sample, Trajectory
from hone.errors import ConfigError
from hone.generation import ENGINES
from hone.generation.protocol import Constraint, Engine, GenerationRequest, SamplingParams
from hone.hub.resolve import local_files
from hone.insight.episode_metrics import episode_metrics
from hone.insight.records import shown_score, trace
from hone.insight.run_files import containing_run, read_run
from hone.models.devices import dtype_on
from hone.models.four_bits import packed_base
from hone.models.loading import load_policy
from hone.progress import counting, progress
from hone.rewards.manager import RewardManager, share_rewards
from hone.trainers.episode_keys import EpisodeKeys
from hone.trainers.inputs import agent_contract, reads_columns, report_contract, self_scored_by, show_first_prompt
from hone.trainers.validation import Evaluation, evaluate_answers
from hone.training.export import base_of_adapter, find_actor
from hone.training.releases import Shelf

log = logging.getLogger(__name__)


@dataclass
class EvaluationRequest:
    """Request of `hone eval`; the attributes are its options."""

    model: str
    files: list[str]
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    constraint: Constraint | None = None
    max_prompt_length: int = 512
    max_response_length: int = 512
    max_samples: int = -1
    reward: RewardConfig = field(default_factory=RewardConfig)
    seed: int = 1
    dtype: str = "auto"
    episodes: EpisodeKeys = field(default_factory=EpisodeKeys)
    prompt_key: str = "prompt"
    answer_key: str | None = None
    reward_fn_key: str = "data_source"


def run_evaluation(request: EvaluationRequest) -> Evaluation:
    """Answer every prompt ``n`` times and score the answers.

    Raises:
        HoneError: model, data or reward is invalid.
    """
    if request.n > 1 and request.temperature == 0:
        raise ConfigError(f"n={request.n} greedy answers would be identical", fix="--temperature 1", code="R32")
    max_model_len = request.max_prompt_length + request.max_response_length
    actor, keys = find_actor(request.model), request.episodes
    tokenizer = load_tokenizer(str(actor))
    images = load_image_processor(weights_of(request.model), tokenizer)
    context = EpisodeContext(tokenizer, keys.multi_turn, keys.agent, keys.template_kwargs, max_model_len, images)
    report_contract(trained_contract(request.model), agent_contract(context), "the evaluation plays")
    dataset = PromptDataset(
        local_files(request.files, "val"),
        tokenizer,
        prompt_key=request.prompt_key,
        reward_fn_key=request.reward_fn_key,
        max_prompt_length=request.max_prompt_length,
        truncation="error",
        max_samples=request.max_samples,
        chat_template_kwargs=keys.template_kwargs,
        shown_of=shown_of(context),
        all_columns=reads_columns(request.reward),
        image_processor=images,
        answer_key=request.answer_key,
        strings_as_messages=keys.strings_as_messages,
    )
    show_first_prompt(dataset, tokenizer)
    engine, _ = open_model(str(actor), max_model_len, request.dtype)
    samples = [dataset[row] for row in range(len(dataset))]
    empty = [sample.uid for sample in samples if request.answer_key and is_missing(sample.ground_truth)]
    if empty:
        where = f"column '{request.answer_key}' is empty in {len(empty)} of {len(samples)} rows; the first: {empty[0]}"
        log.warning("%s. A scorer gives no verdict there", where)
    rewards = RewardManager(request.reward)
    try:
        rewards.check(dataset.data_sources(), self_scored_by(context, samples))
        sampling = SamplingParams(
            max_tokens=request.max_response_length,
            temperature=request.temperature,
            top_p=request.top_p,
            constraint=request.constraint,
            stop_token_ids=stops_of(tokenizer, request.model),
        )
        played = answer(samples, engine, context, sampling, n=request.n, seeding=(request.seed, "validation"))
        evaluation = evaluate_answers(played, share_rewards(played, asyncio.run(rewards.score(played))), request.n)
        verdicts = [score.verdict for score in evaluation.scores]
        evaluation.metrics |= episode_metrics(played, verdicts, request.reward.episode_prices)
        return evaluation
    finally:
        rewards.close()
        context.close()


def answer(
    samples: Sequence[Sample],
    engine: Engine,
    context: EpisodeContext,
    sampling: SamplingParams,
    *,
    n: int,
    seeding: tuple[Any, ...],
) -> list[Trajectory]:
    """Play every sample ``n`` times, in order. The random streams depend on ``seeding`` and the row."""

    def seed_of(uid: str, index: int) -> int:
        return derive_seed(*seeding, uid, index)

    with progress("answers", len(samples) * n) as bar, counting(bar.advance):
        player = Player(engine, context)
        return asyncio.run(player.play(samples, sampling, n=n, seed_of=seed_of))


def ask(
    model: str, prompts: Sequence[str], sampling: SamplingParams, *, n: int, raw: bool, seed: int, dtype: str = "auto"
) -> list[Trajectory]:
    """Answer prompts given as text; ``raw`` skips the chat template, ``dtype`` is as in :func:`open_model`."""
    tokenizer_only = load_tokenizer(str(find_actor(model)))
    samples = []
    for row, prompt in enumerate(prompts):
        messages = None if raw else [{"role": "user", "content": prompt}]
        ids = tokenizer_only.encode(prompt) if messages is None else render_prompt(tokenizer_only, messages)
        samples.append(Sample(uid=str(row), prompt_ids=ids, messages=messages, data_source="ask"))
    max_prompt_length = max(len(sample.prompt_ids) for sample in samples)
    engine, tokenizer = open_model(model, max_prompt_length + sampling.max_tokens, dtype)
    sampling = SamplingParams(**{**vars(sampling), "stop_token_ids": stops_of(tokenizer, model)})

    return answer(samples, engine, EpisodeContext(tokenizer), sampling, n=n, seeding=(seed, "ask"))


def converse(
    model: str,
    said: Iterable[str],
    show: Callable[[str], None],
    sampling: SamplingParams,
    *,
    longest: int,
    system: str | None = None,
    seed: int,
    dtype: str = "auto",
) -> None:
    """Answer what a user says, turn by turn; ``/new`` forgets the conversation.

    Args:
        model: directory, adapter, checkpoint or run, with a chat template.
        said: texts of the user.
        show: called with each new part of an answer, and with the line's end after it.
        sampling: of each answer.
        longest: most tokens of a conversation.
        system: first message of every conversation.
        seed: of the draws.
        dtype: as in :func:`open_model`.

    Raises:
        HoneError: the model cannot be loaded, or a conversation is longer than it can read.
    """
    engine, tokenizer = open_model(model, longest, dtype)
    sampling = replace(sampling, stop_token_ids=stops_of(tokenizer, model))
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages: list[dict[str, Any]] = list(beginning)

    async def reply(turn: int) -> str:
        text, shown = "", 0

        def grow(ids: list[int], *_: object) -> None:
            nonlocal text, shown
            text = str(tokenizer.decode(ids, skip_special_tokens=True))
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the next token completes the character
                show(text[shown:])
                shown = len(text)

        ids = render_prompt(tokenizer, messages)
        here = replace(sampling, max_tokens=max(1, min(sampling.max_tokens, longest - len(ids))))
        request = GenerationRequest(
            str(turn), ids, here, seed=derive_seed(seed, "chat", turn), session="chat", progress=grow
        )
        [completion] = [completion async for completion in engine.generate([request])]
        grow(completion.token_ids)
        return text

    for turn, text in enumerate(said):
        if text.strip() == "/new":
            messages = list(beginning)
        elif text.strip():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": asyncio.run(reply(turn))})
            show("\n")


def trained_contract(model: str) -> dict[str, str]:
    """Return the agent contract of the run or release that a model belongs to; empty if it belongs to none."""
    actor = find_actor(model)
    if (shelf := Shelf.containing(actor)) is not None:
        return dict(shelf.at(actor).record["agent_contract"])
    run = containing_run(actor)
    return read_run(run).get("agent_contract", {}) if run is not None else {}


def weights_of(path: str) -> str:
    """Return the Hugging Face directory of a model, checkpoint or run; for an adapter, of its base model."""
    actor = find_actor(path)
    return str(base_of_adapter(actor) or actor)


def stops_of(tokenizer: PreTrainedTokenizerBase, path: str) -> tuple[int, ...]:
    """Return the tokens that end a response of a model, checkpoint or run; warn where its template ends turns with another."""
    stops = stop_tokens(tokenizer, find_actor(path), weights_of(path))
    end = end_of_turn(tokenizer)
    if end is not None and end not in stops:
        log.warning(
            "'%s' (%d) ends a turn of the chat template, but answers of %s stop only at %s and may continue after it. "
            "Fix: eos_token_id: %s in its generation_config.json",
            tokenizer.decode([end]), end, path, list(stops), [*stops, end],
        )  # fmt: skip
    return stops


def open_model(path: str, max_model_len: int, dtype: str = "auto") -> tuple[Engine, PreTrainedTokenizerBase]:
    """Load a model, adapter, checkpoint or run into a native engine; also return its tokenizer.

    Args:
        path: of the model.
        max_model_len: most tokens of a prompt with its answer.
        dtype: compute dtype: auto, float32, bfloat16 or float16; see :func:`hone.models.devices.dtype_on`.
    """
    return load_engine(path, max_model_len, prepare_torch(RunConfig()), dtype)


def load_engine(
    path: str, max_model_len: int, device: torch.device, dtype: str = "auto"
) -> tuple[Engine, PreTrainedTokenizerBase]:
    """Load a model like :func:`open_model` in a process that computes already; any thread may do it."""
    actor = find_actor(path)
    base = base_of_adapter(actor)
    config = ModelConfig(path=str(base or actor), lora_adapter_path=str(actor) if base else None)
    config.quantization = packed_base(actor)[0]
    tokenizer = load_tokenizer(str(actor))
    with torch.no_grad():
        model = load_policy(config, device=device, seed=0).eval()
    engine = ENGINES.get("native")(
        model=model,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype_on(device, dtype),
        max_num_seqs=256,
        max_cache_tokens=None,
        max_model_len=max_model_len,
    )
    return engine, tokenizer


def report(evaluation: Evaluation, *, show: int, as_json: bool, output: Path | None) -> None:
    """Print metrics and a few answers; write all answers to ``output``."""
    records = evaluation.records()
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("".join(json.dumps(record) + "\n" for record in records))
    console = Console()
    if as_json:
        console.print_json(json.dumps(evaluation.metrics))
        return
    for record in records[:show]:
        console.print(_answer_panel(record))
    table = Table("metric", "value")
    for name, value in sorted(evaluation.metrics.items()):
        table.add_row(name, f"{value:.4f}")
    console.print(table)
    errors = sum(score.error is not None for score in evaluation.scores)
    if errors:
        console.print(
            f"{errors} of {len(evaluation.scores)} answers have no verdict, and count nowhere", style="bold red"
        )


def print_answers(answers: Sequence[Trajectory], *, as_json: bool) -> None:
    """Print answers as text, or as JSON lines with tokens and log-probs."""
    console = Console()
    for answer in answers:
        if as_json:
            record = {
                "prompt": int(answer.uid),
                "index": answer.index,
                "text": answer.text,
                "token_ids": answer.response_ids,
                "log_probs": answer.rollout_log_probs,
                "stop_reason": answer.stop_reason.value,
            }
            console.out(json.dumps(record), highlight=False)
        else:
            console.print(answer.text, markup=False, highlight=False)


def _answer_panel(record: dict[str, Any]) -> Panel:
    body = trace(record) if record["episode"] else f"{record['prompt'] or ''}\n\n{record['text']}"
    title = f"{record['uid']}  {shown_score(record)}  expected {record['ground_truth']}"
    return Panel(Text(body), title=Text(title), title_align="left")
