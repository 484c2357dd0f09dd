"""`hone serve`: an OpenAI-compatible endpoint for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.options import ComputeDtype, Dtype, require_defaults

_WITHOUT_TRAINING = ("chat_template", "renderer", "parser", "engine", "replicas", "audit")
_OF_TRAINING = ("out", "max_rank", "max_adapters")


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Hugging Face model directory, PEFT adapter directory, checkpoint, or name of the hub")
    ],
    name: Annotated[
        str | None, typer.Option(help="model name for clients; by default the name of the directory")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on; other machines need a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0 takes a free one")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            help="API key that clients must send; preferably set in the environment", envvar="HONE_SERVE_TOKEN"
        ),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="most tokens of a prompt with its answer")] = None,
    allow_long_max_model_len: Annotated[
        bool, typer.Option("--allow-long-max-model-len", help="allow more than the model's max_position_embeddings")
    ] = False,
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja file, or its text, in place of the tokenizer's chat template")
    ] = None,
    renderer: Annotated[
        str, typer.Option(help="rendering of messages as tokens: auto, text_tools, or a family; see docs/models.md")
    ] = "auto",
    parser: Annotated[str, typer.Option(help="format of tool calls: auto, hermes, ...; see docs/models.md")] = "auto",
    engine: Annotated[str, typer.Option(help="native, or an engine installed by `hone engines install`")] = "native",
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="engines in separate processes with one queue; by default native in this process"
        ),
    ] = None,
    audit: Annotated[
        Path | None, typer.Option(help="folder for an append-only log of the model's tool calls; see `hone audit`")
    ] = None,
    dtype: ComputeDtype = Dtype.auto,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="train and sample LoRA adapters of the model instead, by the protocol of the client `tinker`",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="with --train: folder for saved weights; by default a temporary one")
    ] = None,
    max_rank: Annotated[int, typer.Option(min=1, metavar="N", help="with --train: largest rank of an adapter")] = 128,
    max_adapters: Annotated[
        int, typer.Option(min=1, metavar="N", help="with --train: most adapters in training at once")
    ] = 16,
) -> None:
    """Serve a model with an OpenAI-compatible API, and record conversations as exact tokens."""
    server = {
        "model": model,
        "name": name,
        "host": host,
        "port": port,
        "token": token,
        "max_model_len": max_model_len,
        "allow_long_max_model_len": allow_long_max_model_len,
        "dtype": dtype.value,
    }
    if train:
        require_defaults(
            context,
            _WITHOUT_TRAINING,
            "with --train",
            "a training service has the client's tokens and one native engine",
        )
        from hone.apps.tinker.serve import TrainRequest, serve_training

        serve_training(TrainRequest(**server, out=out, max_rank=max_rank, max_adapters=max_adapters))
        return
    require_defaults(context, _OF_TRAINING, "without --train", "nothing is trained")
    from hone.trainers.served_model import ServeRequest
    from hone.trainers.serving import serve

    serve(
        ServeRequest(
            **server,
            chat_template=chat_template,
            renderer=renderer,
            parser=parser,
            engine=engine,
            replicas=replicas,
            audit=audit,
        )
    )
