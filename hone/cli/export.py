"""`hone export`: a trained model as a plain Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    source: Annotated[Path, typer.Argument(help="run directory, checkpoint (.../step_N), or its actor directory")],
    out: Annotated[Path, typer.Option("--out", help="directory to write")],
    merge: Annotated[
        bool, typer.Option(help="merge a LoRA adapter into its base; otherwise the adapter is copied")
    ] = True,
    dtype: Annotated[str, typer.Option(help="dtype of the weights written: float32, bfloat16 or float16")] = "float32",
) -> None:
    """Write weights, configuration and tokenizer where transformers, vLLM and PEFT load them."""
    from rich.console import Console

    from hone.training.export import export

    written = export(source, out, merge=merge, dtype=dtype)
    Console().print(f"wrote {written}", markup=False, highlight=False)
