"""`hone generate`: answers of a model to prompts."""

from __future__ import annotations

from typing import Annotated

import typer

from hone.cli.options import CONSTRAINT_HELP, ComputeDtype, Dtype

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
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
