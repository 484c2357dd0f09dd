"""`hone export`: write a trained model as a plain Hugging Face directory."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    source: Annotated[
        str, typer.Argument(help="run directory, checkpoint (.../step_N, .../best), or its actor directory; or a URL")
    ],
    out: Annotated[str, typer.Option("--out", help="directory or URL to write")],
    merge: Annotated[
        bool, typer.Option(help="merge a LoRA adapter into its base; otherwise the adapter is copied")
    ] = True,
    dtype: Annotated[str, typer.Option(help="dtype of the weights written: float32, bfloat16 or float16")] = "float32",
    max_shard_size: Annotated[str, typer.Option(help="largest safetensors file, for example 5GB or 500MB")] = "5GB",
) -> None:
    """Write weights, configuration and tokenizer in a form that transformers, vLLM and PEFT load."""
    from rich.console import Console

    from hone.training.export import export, parse_size

    size, proofs = parse_size(max_shard_size), list[str]()
    written = export(source, out, merge=merge, dtype=dtype, largest_file=size, report=proofs.append)
    Console().print("\n".join([f"wrote {written}", *proofs]), markup=False, highlight=False)
