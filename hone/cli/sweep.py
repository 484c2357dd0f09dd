"""`hone sweep`: train a grid or random draws of a configuration, with a table and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.cli.options import ConfigName, ConfigPath, Json, Kind, Of, Preset

if TYPE_CHECKING:
    from hone.apps.lab.sweeps import SweepResult
    from hone.cli.trials import Trial

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="key=values",
            help="overrides; several values are swept: key=1,2,3, key=range(1,10,3), key=choice(a,b), key=interval(0.1,1)",
        ),
    ] = None,
    program: Of = Kind.train,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    draws: Annotated[
        int | None, typer.Option("--random", help="train this many random draws instead of the grid", min=1)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="seed of the random draws")] = 0,
    metric: Annotated[str | None, typer.Option("--metric", help="score of a trial; default as in hone twins")] = None,
    out: Annotated[Path, typer.Option("--out", help="folder of the runs")] = Path("runs/sweep"),
    on_ray: Annotated[bool, typer.Option("--ray", help="trials are tasks of a Ray cluster")] = False,
    address: Annotated[str | None, typer.Option("--address", help="Ray cluster; default: one on this machine")] = None,
    cpus: Annotated[float, typer.Option("--cpus", help="cores of a trial on Ray", min=0)] = 1,
    gpus: Annotated[float, typer.Option("--gpus", help="GPUs of a trial on Ray", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Train every combination of the given values, or random ones, and rank them.

    The grammar is that of Hydra's multirun; tag(log,interval(1e-6,1e-3)) draws on a logarithmic scale. The same command continues
    after an interruption, and with more values it trains only the new ones. The plot is sweep.png in the folder.
    """
    from hone.apps.lab.sweeps import draw_sweep, open_sweep, read_sweep
    from hone.config.sweeps import draw_trials, grid, parse_sweep
    from hone.errors import ConfigError, HoneError

    fixed, axes = parse_sweep(overrides or [])
    if not axes:
        raise ConfigError(
            "no key has several values", fix="list them: actor_rollout_ref.actor.optim.lr=1e-5,1e-4", where="hone sweep"
        )
    trials = grid(axes) if draws is None else draw_trials(axes, draws, seed)
    options = {"preset": preset, "config_path": config_path, "config_name": config_name}
    source = {name: value for name, value in options.items() if value is not None}
    lines = [[*fixed, *(f"{key}={value}" for key, value in values.items())] for values in trials]
    hashes = [_checked(program, line, source) for line in lines]
    directories = open_sweep(out, {"command": program.value, "overrides": fixed, **source}, trials, hashes)
    jobs = [_job(program, *pair, source, on_ray) for pair in zip(lines, directories, strict=True)]
    left = [job for job in jobs if not job.finished]
    ended = _on_ray(left, address, cpus, gpus) if on_ray else _here(left)
    failures = [message for message in ended if message]
    result = read_sweep(out, metric)
    if result.score:
        draw_sweep(out / "sweep.png", result)
    _show(result, as_json)
    if failures:
        raise HoneError(
            f"{len(failures)} of {len(trials)} trials failed; the first: {failures[0]}",
            fix="correct it and run the same command: finished trials are not repeated",
            where=str(out),
            code="E-runs",
        )


def _checked(program: Kind, line: Sequence[str], source: Mapping[str, str]) -> str:
    from hone.apps.lab.sweeps import config_hash
    from hone.config.environment import written_leaves
    from hone.config.load import load_config
    from hone.config.trees import TREES

    config = load_config(
        TREES[program.value],
        list(line),
        preset=source.get("preset"),
        config_path=source.get("config_path"),
        config_name=source.get("config_name"),
        by_method=True,
    )
    return config_hash(dict(written_leaves(config)))


def _job(program: Kind, line: Sequence[str], path: Path, source: Mapping[str, str], on_ray: bool) -> Trial:
    """Return the command of a trial; on Ray it has a whole path, and runs in this command's directory."""
    from hone.cli.trials import Trial, settings_of

    directory = path.absolute() if on_ray else path
    named = [word for name, value in source.items() for word in (f"--{name.replace('_', '-')}", value)]
    keys = settings_of(program.value, directory, {})
    return Trial((program.value, *named, *line, *keys), directory, Path.cwd() if on_ray else None)


def _here(jobs: Sequence[Trial]) -> Iterator[str]:
    """Train trials one after another; yield the error of each, empty for none."""
    for number, job in enumerate(jobs, 1):
        typer.echo(f"trial {number} of {len(jobs)}: {job.directory}", err=True)
        yield attempt(job)


def _on_ray(jobs: Sequence[Trial], address: str | None, cpus: float, gpus: float) -> Iterator[str]:
    """Train trials as tasks of a Ray cluster; yield the error of each, empty for none."""
    from hone.cluster.ray.trials import run_tasks

    if not jobs:
        return
    for index, message in run_tasks(attempt, jobs, cpus=cpus, gpus=gpus, address=address):
        typer.echo(f"trial {jobs[index].directory} ended", err=True)
        yield message


def attempt(job: Trial) -> str:
    """Train a trial; return the error, empty for none."""
    from hone.cli import trials
    from hone.errors import HoneError

    try:
        trials.run_trial(job)
    except HoneError as error:
        return f"{error.where}: {error.what}"
    return ""


def _show(result: SweepResult, as_json: bool) -> None:
    from hone.cli.run_compare import print_confidence
    from hone.cli.run_output import new_console, new_table, number, print_json

    if as_json:
        lead = result.lead and result.lead.record()
        print_json(vars(result) | {"trials": [vars(trial) for trial in result.trials], "lead": lead})
        return
    keys = list(dict.fromkeys(key for trial in result.trials for key in trial.values))
    table = new_table("trial", *(f"{key}>" for key in keys), f"{result.score or 'score'}>", "status")
    for trial in result.trials:
        cells = [trial.values.get(key, "") for key in keys]
        table.add_row(trial.directory.name, *cells, number(trial.score), trial.status)
    console = new_console()
    console.print(table)
    print_confidence(console, [result.lead] if result.lead else [])
