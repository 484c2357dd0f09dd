"""`hone engines mismatch`: comparison of an engine's log-probs with the trainer's, for a given model."""

from __future__ import annotations

from typing import Annotated

import typer

from hone.cli.options import Json


def mismatch(
    model: Annotated[str, typer.Option(help="Hugging Face model directory")],
    engine: Annotated[str, typer.Option(help="native, hf, vllm, sglang or trtllm")] = "native",
    dtype: Annotated[str, typer.Option(help="compute dtype of the engine, float32, bfloat16 or float16")] = "float32",
    trainer_dtype: Annotated[
        str | None, typer.Option(help="compute dtype of the trainer; by default the engine's")
    ] = None,
    samples: Annotated[int, typer.Option(help="number of sampled answers", min=1)] = 32,
    tokens: Annotated[int, typer.Option(help="tokens per answer", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="sampling temperature, also used by the trainer")] = 1.0,
    seed: Annotated[int, typer.Option(help="seed of the draws")] = 1,
    as_json: Json = False,
) -> None:
    """Sample answers and compare the log-probs of engine and trainer; prints a verdict: good, look or bad.

    The output of an engine in a separate process goes to engine-mismatch.log.
    """
    from hone.apps.lab.mismatch import MismatchRequest, measure, report

    request = MismatchRequest(model, engine, dtype, trainer_dtype, samples, tokens, temperature, seed)
    report(measure(request), as_json=as_json)
