"""`hone data`: make datasets and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Make datasets and tokenizers.")


@app.command()
def make(
    task: Annotated[str, typer.Argument(help="arithmetic, digit_sequence, countdown, or reasoning_gym:<dataset>")],
    options: Annotated[
        list[str] | None, typer.Argument(help="task options as key=value, for example max_number=50")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="directory for train.parquet and val.parquet")] = Path("data"),
    size: Annotated[int, typer.Option(min=1, help="training rows")] = 10000,
    val_size: Annotated[
        int, typer.Option(min=1, help="held-out rows; none of their questions is in the training file")
    ] = 512,
    seed: Annotated[int, typer.Option(help="seed of the draws")] = 1,
) -> None:
    """Write a dataset with worked solutions (for SFT) and ground truths (for RL). No network is needed."""
    from rich.console import Console

    from hone.data.tasks import make_files, task_maker

    paths = make_files(task_maker(task, _options(options or [])), out, size=size, val_size=val_size, seed=seed)
    console = Console()
    for path, rows in zip(paths, (size, val_size), strict=True):
        console.print(f"wrote {path} ({rows} rows)", markup=False, highlight=False)


@app.command()
def tokenizer(
    files: Annotated[list[Path], typer.Option("--files", help="dataset or plain-text file; may be repeated")],
    out: Annotated[Path, typer.Option("--out", help="Hugging Face directory to write")],
    vocab_size: Annotated[
        int, typer.Option(min=264, help="tokens in the vocabulary, specials and bytes included")
    ] = 512,
    max_samples: Annotated[int, typer.Option(help="read at most this many rows of each file")] = 20000,
) -> None:
    """Train a small byte-level BPE tokenizer (digits split) with a ChatML template."""
    from rich.console import Console

    from hone.data.texts import texts_of
    from hone.data.tokenizer import train_tokenizer

    made = train_tokenizer(texts_of(files, max_samples), vocab_size)
    made.save_pretrained(out)
    Console().print(f"wrote {out} ({len(made)} tokens)", markup=False, highlight=False)


def _options(words: list[str]) -> dict[str, str]:
    from hone.errors import ConfigError

    for word in words:
        if "=" not in word:
            raise ConfigError(f"'{word}' is not an option", fix="give task options as key=value")
    return dict(word.split("=", 1) for word in words)
