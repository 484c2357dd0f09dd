"""`hone generate`, `hone chat` and `hone eval`: answers of a model, and their accuracy on a dataset."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.options import (
    CONSTRAINT_HELP,
    AnswerKey,
    ComputeDtype,
    Dtype,
    PromptKey,
    RewardKey,
    require_defaults,
)
from hone.cli.output import print_json
from hone.errors import ConfigError


def generate(
    model: Annotated[str, typer.Argument(help="Hugging Face model directory, PEFT adapter directory, or checkpoint")],
    prompts: Annotated[list[str], typer.Argument(help="prompts; several are answered together")],
    n: Annotated[int, typer.Option(help="answers per prompt")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus sampling")] = 1.0,
    top_k: Annotated[int, typer.Option(help="sample from the k most likely tokens; -1 means all")] = -1,
    max_tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 256,
    constraint: Annotated[str | None, typer.Option(help=CONSTRAINT_HELP)] = None,
    raw: Annotated[bool, typer.Option(help="use the prompt unchanged, without the chat template")] = False,
    seed: Annotated[int, typer.Option(help="seed of the draws")] = 1,
    dtype: ComputeDtype = Dtype.auto,
    json_output: Annotated[bool, typer.Option("--json", help="print tokens, text and log-probs as JSON lines")] = False,
) -> None:
    """Generate answers with the native engine."""
    from hone.generation.constraints import constraint_option
    from hone.generation.protocol import SamplingParams
    from hone.trainers.evaluation import ask, print_answers

    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        constraint=constraint_option(constraint),
    )
    print_answers(ask(model, prompts, sampling, n=n, raw=raw, seed=seed, dtype=dtype.value), as_json=json_output)


def chat(
    model: Annotated[
        str, typer.Argument(help="Hugging Face model directory, PEFT adapter directory, checkpoint or run")
    ],
    system: Annotated[str | None, typer.Option(help="system message of the conversation")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.7,
    top_p: Annotated[float, typer.Option(help="nucleus sampling")] = 0.95,
    max_tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 512,
    seed: Annotated[int, typer.Option(help="seed of the draws")] = 1,
    dtype: ComputeDtype = Dtype.auto,
) -> None:
    """Talk with a model: a line is a message, /new begins again, Ctrl-D ends."""
    from hone.generation.protocol import SamplingParams
    from hone.trainers.evaluation import converse, weights_of
    from hone.trainers.served_model import context_length

    def lines() -> Iterator[str]:
        while True:
            try:
                yield input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return

    def show(text: str) -> None:
        typer.echo(text, nl=False)

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    longest = context_length(weights_of(model))
    converse(model, lines(), show, sampling, longest=longest, system=system, seed=seed, dtype=dtype.value)


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Hugging Face model directory, PEFT adapter directory, or checkpoint")],
    data: Annotated[
        list[str] | None, typer.Option("--data", help="dataset file (parquet, json, jsonl, csv); may be repeated")
    ] = None,
    episodes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="key=value", help="keys of multi_turn and agent for episodes of several turns, and of reward"
        ),
    ] = None,
    n: Annotated[int, typer.Option(help="answers per prompt")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy; n > 1 needs a positive one")] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus sampling")] = 1.0,
    constraint: Annotated[str | None, typer.Option(help=CONSTRAINT_HELP)] = None,
    max_prompt_length: Annotated[int, typer.Option(help="longest prompt in tokens")] = 512,
    max_response_length: Annotated[int, typer.Option(help="most tokens of an answer")] = 512,
    max_samples: Annotated[int, typer.Option(help="use at most this many rows, or samples of a task; -1: all")] = -1,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE:TASK[,TASK]",
            help="tasks of lm-eval or inspect in place of a dataset, with options of its command; may be repeated",
        ),
    ] = None,
    suite_python: Annotated[str | None, typer.Option(help="Python in which the suite's package is installed")] = None,
    reward: Annotated[
        str | None, typer.Option(help="reward function as FILE:NAME, instead of the built-in scorer")
    ] = None,
    scorer: Annotated[str | None, typer.Option(help="built-in scorer for every row")] = None,
    seed: Annotated[int, typer.Option(help="seed of the draws")] = 1,
    dtype: ComputeDtype = Dtype.auto,
    prompt_key: PromptKey = "prompt",
    answer_key: AnswerKey = None,
    reward_fn_key: RewardKey = "data_source",
    output: Annotated[
        Path | None, typer.Option(help="write every answer to this .jsonl file; of a suite, all files to this folder")
    ] = None,
    show: Annotated[int, typer.Option(help="print this many answers")] = 3,
    json_output: Annotated[bool, typer.Option("--json", help="print the metrics as JSON")] = False,
) -> None:
    """Answer every prompt of a dataset, score the answers, and print accuracy by data source; or run suites of others.

    A model in the directory of a run uses that run's blocks multi_turn and agent. The reward is that
    of the rows, unless an option or key says another. Example:
    hone eval runs/calc --data val.parquet multi_turn.max_assistant_turns=4 reward=[exact_match,rewards.py:short]
    """
    if suite:
        require_defaults(context, _OF_DATA, "with --suite", "the suite has its own data, prompts and sampling")
        _evaluate_suites(model, suite, suite_python, max_samples, dtype.value, output, as_json=json_output)
        return
    if not data:
        raise ConfigError("nothing is evaluated", fix="--data FILE, or --suite lm-eval:TASK", where="--data")
    require_defaults(context, ("suite_python",), "without --suite", "the rows are scored by Hone")
    from hone.config.overrides import hydra_value
    from hone.generation.constraints import constraint_option
    from hone.trainers.episode_keys import episode_keys, reward_of
    from hone.trainers.evaluation import EvaluationRequest, report, run_evaluation
    from hone.training.export import find_actor

    given = {"reward": reward, "reward.scorer": scorer}
    rewards, words = reward_of(
        [*(episodes or []), *(f"{key}={hydra_value(value)}" for key, value in given.items() if value)]
    )
    request = EvaluationRequest(
        model=model,
        files=data,
        n=n,
        temperature=temperature,
        top_p=top_p,
        constraint=constraint_option(constraint),
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        max_samples=max_samples,
        reward=rewards,
        seed=seed,
        dtype=dtype.value,
        episodes=episode_keys(find_actor(model), words),
        prompt_key=prompt_key,
        answer_key=answer_key,
        reward_fn_key=reward_fn_key,
    )
    evaluation = run_evaluation(request)
    report(evaluation, show=show, as_json=json_output, output=output)
    if all(score.error is not None for score in evaluation.scores):
        raise typer.Exit(2)  # nothing was measured


_OF_DATA = (
    "data", "episodes", "n", "temperature", "top_p", "constraint", "max_prompt_length", "max_response_length", "reward",
    "scorer", "seed", "prompt_key", "answer_key", "reward_fn_key", "show",
)  # fmt: skip


def _evaluate_suites(
    model: str, texts: list[str], python: str | None, limit: int, dtype: str, output: Path | None, *, as_json: bool
) -> None:
    from hone.agents.suites import PACKAGES, all_metrics, read_suites

    suites = read_suites(texts, dict.fromkeys(PACKAGES, python) if python else {}, "--suite-python")
    from hone.agents.program.process import MODEL
    from hone.trainers.served_model import ServeRequest
    from hone.trainers.serving import run_suites

    with tempfile.TemporaryDirectory(prefix="hone-suites-") as folder:
        scores = run_suites(ServeRequest(model, MODEL, port=0, dtype=dtype), suites, output or Path(folder), limit)
    metrics = all_metrics(scores)
    if as_json:
        versions = {f"val-suite/{score.suite}/version": score.version for score in scores}
        print_json({**metrics, **versions})
        return
    for score in scores:
        typer.echo(f"{score.suite} {score.version}, task {score.task} (version {score.task_version})")
    for name, value in sorted(metrics.items()):
        typer.echo(f"  {name}  {value:.4f}")
