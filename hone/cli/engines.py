"""`hone engines`: external inference engines, each in a separate environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import Json, new_group
from hone.cli.output import new_console, new_table, print_json
from hone.errors import ConfigError, GenerationError, ProcessError

if TYPE_CHECKING:
    from hone.generation.remote import LaunchPlan

app = new_group("Install, check, list and serve external inference engines.")


@app.command()
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


_ENV = typer.Option(
    "--env", help="environment of the engine; default: $HONE_ENGINES/NAME or ~/.cache/hone/engines/NAME"
)


@app.command("list")
def list_engines(as_json: Json = False) -> None:
    """Show all engines with their installation and the machines on which they were verified."""
    from hone.generation.environments import engine_table

    rows = engine_table()
    if as_json:
        print_json([vars(row) for row in rows])
        return
    table = new_table("engine", "runs in", "installed", "conformance suite passed")
    for row in rows:
        table.add_row(row.name, row.place, row.installed, row.verified)
    new_console().print(table)


@app.command()
def install(
    name: Annotated[str, typer.Argument(help="vllm, sglang or trtllm")],
    cpu: Annotated[bool | None, typer.Option("--cpu/--gpu", help="its build; default: what this machine has")] = None,
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


def run_server(plan: LaunchPlan, options: Sequence[str]) -> None:
    """Start an engine, print its address, and wait for a signal."""
    import signal
    import threading
    from dataclasses import replace

    from hone.generation.remote import EngineProcess
    from hone.generation.remote.engine import TOKEN_VARIABLE

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not _loopback(plan.host):
        raise ConfigError(
            f"the engine would listen on {plan.host} without a token",
            why="anyone who can reach the port could use it and replace its weights",
            fix=f"export {TOKEN_VARIABLE}=SECRET here and for the run, or --host 127.0.0.1",
        )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    process = EngineProcess(replace(plan, options=_parsed(options)), token)
    try:
        typer.echo(f"{plan.engine} serves {plan.model}: rollout.engine_url=tcp://{plan.host}:{process.port}")
        while not stop.wait(1.0):
            if not process.alive():
                raise ProcessError(process.exit_reason(), fix="run the same command again; the log has the reason")
    finally:
        process.kill()


def _loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parsed(options: Sequence[str]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    for option in options:
        if "=" not in option:
            raise ConfigError(f"--option {option} is not NAME=VALUE", fix="--option enforce_eager=true")
    parsed = OmegaConf.to_container(OmegaConf.from_dotlist(list(options)))
    assert isinstance(parsed, dict)
    return {str(name): value for name, value in parsed.items()}
