"""`hone serve`: an OpenAI-compatible endpoint for a model."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    model: Annotated[str, typer.Option(help="Hugging Face model directory, PEFT adapter directory, or checkpoint")],
    name: Annotated[
        str | None, typer.Option(help="what clients call the model; the directory's name unless given")
    ] = None,
    host: Annotated[
        str, typer.Option(help="address to serve; other machines reach it only with a token")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(help="API key that clients must send; better in the environment", envvar="HONE_SERVE_TOKEN"),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="most tokens of a prompt with its answer")] = None,
    renderer: Annotated[str, typer.Option(help="how messages become tokens; see docs/agents.md")] = "auto",
    parser: Annotated[str, typer.Option(help="how tool calls are read")] = "auto",
    engine: Annotated[str, typer.Option(help="native, or one that `hone engines install` has installed")] = "native",
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="engines in processes of their own behind one queue; none: native, in this one"),
    ] = None,
) -> None:
    """Serve a model to every program that speaks OpenAI's API, and record conversations as exact tokens."""
    from hone.trainers.serving import ServeRequest, serve

    serve(
        ServeRequest(
            model=model,
            name=name,
            host=host,
            port=port,
            token=token,
            max_model_len=max_model_len,
            renderer=renderer,
            parser=parser,
            engine=engine,
            replicas=replicas,
        )
    )
