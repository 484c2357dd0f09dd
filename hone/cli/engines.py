"""`hone engines`: external inference engines, each in a separate environment."""

from __future__ import annotations

from pathlib import Path
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


app = typer.Typer(add_completion=False, no_args_is_help=True)

_ENV = typer.Option(
    "--env", help="environment of the engine; default: $HONE_ENGINES/NAME or ~/.cache/hone/engines/NAME"
)


@app.command("list")
def list_engines(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Show all engines with their installation and the machines on which they were verified."""
    import json

    from rich.console import Console
    from rich.table import Table

    from hone.generation.environments import engine_table

    rows = engine_table()
    if as_json:
        typer.echo(json.dumps([vars(row) for row in rows]))
        return
    table = Table("engine", "runs in", "installed", "conformance suite passed")
    for row in rows:
        table.add_row(row.name, row.place, row.installed, row.verified)
    Console().print(table)


@app.command()
def install(
    name: Annotated[str, typer.Argument(help="vllm, sglang or trtllm")],
    cpu: Annotated[bool, typer.Option("--cpu", help="the build for CPUs")] = False,
    env: Annotated[Path | None, _ENV] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing environment")] = False,
) -> None:
    """Create an engine's environment with the versions that Hone was tested with."""
    from hone.generation.environments import environment_of, install

    install(name, cpu=cpu, environment=environment_of(name, str(env) if env else None), force=force, say=typer.echo)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="engine to check: vllm, sglang, trtllm, or native in a separate process")],
    env: Annotated[Path | None, _ENV] = None,
    log: Annotated[Path, typer.Option("--log", help="file for what the engine prints")] = Path("engine-check.log"),
) -> None:
    """Serve a small random model, replace its weights, and compare tokens and log-probs with transformers."""
    from hone.errors import GenerationError
    from hone.generation.check import TOLERANCE, check_engine
    from hone.generation.environments import interpreter_of

    result = check_engine(name, interpreter_of(name, str(env) if env else None), log)
    version = f"{name} {result.version}".strip()
    typer.echo(f"{version} on {result.device}: ready after {result.start_seconds:.1f} s")
    typer.echo(f"  largest log-prob difference from transformers: {result.gap:.1e} nats")
    typer.echo(f"  after new weights ({result.update_seconds * 1000:.0f} ms): {result.gap_after_update:.1e} nats")
    typer.echo(f"  {result.tokens_per_second:.0f} tokens/s with 16 requests of a model of 0.3M parameters")
    if not result.passed:
        raise GenerationError(
            f"engine {name} differs from transformers by more than {TOLERANCE} nats, or in its tokens",
            why="training would use samples of a different policy",
            fix=f"hone engines install {name} --force; or actor_rollout_ref.rollout.name=native",
        )
    typer.echo("passed")


@app.command()
def serve(
    name: Annotated[str, typer.Argument(help="vllm, sglang, trtllm or native")],
    model: Annotated[str, typer.Option("--model", help="Hugging Face directory")],
    max_model_len: Annotated[int, typer.Option("--max-model-len", help="longest prompt with response, in tokens")],
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="port to listen on; 0 takes a free one")] = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16")] = "bfloat16",
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="most concurrent sequences")] = 256,
    max_cache_tokens: Annotated[int | None, typer.Option("--max-cache-tokens", help="capacity of the cache")] = None,
    env: Annotated[Path | None, _ENV] = None,
    log: Annotated[Path, typer.Option("--log", help="file for what the engine prints")] = Path("engine.log"),
    option: Annotated[list[str] | None, typer.Option("--option", help="NAME=VALUE, an argument of the engine")] = None,
) -> None:
    """Run an engine until this command ends; training runs attach to it with rollout.engine_url."""
    from hone.cli.engine_server import run_server
    from hone.generation.environments import interpreter_of
    from hone.generation.remote import LaunchPlan

    run_server(
        LaunchPlan(
            engine=name,
            python=str(interpreter_of(name, str(env) if env else None)),
            model=model,
            tokenizer=model,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_cache_tokens=max_cache_tokens,
            host=host,
            port=port,
            log=log,
        ),
        option or [],
    )


app.command()(mismatch)
