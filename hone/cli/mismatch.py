"""`hone engines mismatch`: an engine's log-probs against the trainer's, for a model that is to be trained."""

from __future__ import annotations

from typing import Annotated

import typer

from hone.cli.options import Json


def mismatch(
    model: Annotated[str, typer.Option(help="Hugging Face model directory")],
    engine: Annotated[str, typer.Option(help="native, hf, vllm, sglang or trtllm")] = "native",
    dtype: Annotated[str, typer.Option(help="compute dtype of the engine, float32 or bfloat16")] = "float32",
    trainer_dtype: Annotated[
        str | None, typer.Option(help="compute dtype of the trainer; the engine's unless given")
    ] = None,
    samples: Annotated[int, typer.Option(help="answers that are sampled", min=1)] = 32,
    tokens: Annotated[int, typer.Option(help="tokens of each", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="of sampling; the trainer uses the same")] = 1.0,
    seed: Annotated[int, typer.Option(help="seed of the draws")] = 1,
    as_json: Json = False,
) -> None:
    """Sample answers and compare the log-probs of engine and trainer; prints a verdict: good, look or bad.

    What an engine in a process of its own prints goes to engine-mismatch.log.
    """
    from hone.trainers.mismatch import MismatchRequest, measure, report

    request = MismatchRequest(model, engine, dtype, trainer_dtype, samples, tokens, temperature, seed)
    report(measure(request), as_json=as_json)
