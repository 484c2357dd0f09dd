"""`hone data`: make, check, convert and inspect datasets; train tokenizers; test chat templates; mine preference pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli import data_checks, data_template

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def group() -> None:
    """Make, check, convert and inspect datasets; train tokenizers; test chat templates; mine preference pairs."""


@app.command("make")
def make(
    task: Annotated[
        str,
        typer.Argument(
            help="arithmetic, digit_sequence, countdown, programs, shapes, reasoning_gym:<dataset>, calculator, multi_hop, book, search_qa, or "
            "environment:<name>"
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="directory for train.parquet and val.parquet")],
    options: Annotated[list[str] | None, typer.Argument(help="options of the task, key=value")] = None,
    size: Annotated[int, typer.Option(help="training problems")] = 10000,
    val_size: Annotated[int, typer.Option(help="held-out problems")] = 256,
    seed: Annotated[int, typer.Option(help="seed of the problems")] = 1,
) -> None:
    """Make a dataset of problems with checkable answers; no network is needed."""
    from hone.agents import tasks
    from hone.data.tasks.make import make_task, write_task

    assert tasks.__all__  # importing them registers them
    train, val = write_task(make_task(task, options or []), out, size=size, val_size=val_size, seed=seed)
    typer.echo(f"{train}: {size} problems\n{val}: {val_size} problems, none of them in the training data")


@app.command("tokenizer")
def tokenizer(
    files: Annotated[list[Path], typer.Option("--files", help="dataset file to learn from; may be repeated")],
    out: Annotated[Path, typer.Option("--out", help="tokenizer directory to write")],
    vocab_size: Annotated[int, typer.Option(help="total number of tokens, at least 260")] = 512,
    template: Annotated[
        str,
        typer.Option(
            help="chat template: chatml, chatml_tools (shows tools), in the shape of a family's qwen3, function_gemma or harmony "
            "(GPT-OSS), or a Jinja file"
        ),
    ] = "chatml",
) -> None:
    """Train a small byte-level BPE tokenizer (each digit a token) with a chat template."""
    from hone.apps.lab.data.inspection import train_tokenizer

    trained = train_tokenizer(files, out, vocab_size=vocab_size, template=template)
    typer.echo(f"{out}: {len(trained)} tokens, end of sequence {trained.eos_token}, chat template {template}")


@app.command("pairs")
def pairs(
    run: Annotated[Path, typer.Argument(help="run directory of `hone train` with rollouts")],
    out: Annotated[Path, typer.Option("--out", help="directory for train.parquet and val.parquet")],
    margin: Annotated[float, typer.Option(help="least difference of scores in a pair")] = 0.0,
    val_share: Annotated[float, typer.Option(help="share of the prompts held out for validation")] = 0.1,
    per_prompt: Annotated[int, typer.Option(help="most pairs of one prompt")] = 4,
    form: Annotated[
        str | None,
        typer.Option("--as", help="messages, or tokens (exactly those sampled); by default messages where prompts are"),
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the split")] = 1,
) -> None:
    """Make preference pairs for `hone prefer` from a run's rollouts: good and bad answers to one prompt."""
    from hone.apps.lab.rewards.comparison import mine_pairs, write_pairs

    mined = mine_pairs(run, margin=margin, val_share=val_share, per_prompt=per_prompt, form=form, seed=seed)
    left_out = "".join(f", {count} left out ({reason})" for reason, count in mined.left_out.items())
    typer.echo(f"{run}: {mined.samples} answers to {mined.prompts} prompts{left_out}")
    for path, rows in zip(write_pairs(mined, out), (mined.train, mined.val), strict=False):
        typer.echo(f"{path}: {len(rows)} pairs of {len({row['uid'] for row in rows})} prompts")


for _name in ("check", "clean", "stats", "inspect", "convert"):
    app.command(_name)(getattr(data_checks, _name))
app.command("template")(data_template.template)
