"""`hone init`: a model with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    arch: Annotated[str, typer.Option(help="architecture: qwen3, llama, gemma, gpt_oss, ...")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer directory; the model gets its vocabulary")],
    out: Annotated[Path, typer.Option(help="model directory to write")],
    size: Annotated[str, typer.Option(help="approximate number of parameters: 900k, 1m, 5m, 1b")] = "1m",
    context: Annotated[int, typer.Option(help="longest sequence in tokens")] = 1024,
    seed: Annotated[int, typer.Option(help="seed of the weights")] = 0,
) -> None:
    """Write a Hugging Face model directory with random weights."""
    from transformers.utils.logging import disable_progress_bar

    from hone.models.init import init_model

    disable_progress_bar()
    count, whole = init_model(arch, size, tokenizer, out, seed=seed, context=context)
    config = whole.get_text_config()
    typer.echo(
        f"{out}: {arch}, {count:,} parameters ({config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"{config.num_attention_heads} heads, vocabulary {config.vocab_size})"
    )
