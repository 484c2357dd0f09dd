"""`hone init`: a model with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    arch: Annotated[str, typer.Option(help="architecture: qwen3, llama, gemma3, gpt_oss, ...")],
    size: Annotated[str, typer.Option(help="parameters, for example 1m or 5m")],
    tokenizer: Annotated[str, typer.Option(help="directory of the tokenizer; its vocabulary is the model's")],
    out: Annotated[Path, typer.Option("--out", help="Hugging Face directory to write")],
    seed: Annotated[int, typer.Option(help="seed of the weights")] = 0,
    context: Annotated[int, typer.Option(help="longest sequence in tokens")] = 1024,
) -> None:
    """Write a random-initialised Hugging Face model directory (config, weights, tokenizer)."""
    from rich.console import Console

    from hone.training.init_model import init_model

    count = init_model(arch, size, tokenizer, out, seed=seed, context=context)
    Console().print(f"wrote {out} ({arch}, {count:,} parameters)", markup=False, highlight=False)
