"""`hone twins`: train two configurations in pairs until one is better, or they are equal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import Json, Kind, Of, Overrides, Preset

if TYPE_CHECKING:
    from hone.apps.lab.twins import TwinPair

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    first: Annotated[Path, typer.Argument(metavar="A.yaml", help="first configuration")],
    second: Annotated[Path, typer.Argument(metavar="B.yaml", help="second configuration")],
    overrides: Overrides = None,
    program: Of = Kind.train,
    preset: Preset = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="score of a pair; default: validation score, else training reward, else loss"),
    ] = None,
    margin: Annotated[
        float, typer.Option("--margin", help="smallest difference that matters, in units of the score")
    ] = 0.02,
    confidence: Annotated[
        float, typer.Option("--confidence", help="1 minus the error rate of each outcome", min=0.5, max=0.999)
    ] = 0.95,
    max_pairs: Annotated[
        int, typer.Option("--max-pairs", help="end without a decision after this many pairs", min=1)
    ] = 20,
    first_seed: Annotated[
        int, typer.Option("--first-seed", help="seed of the first pair; the next has one more", min=0)
    ] = 1,
    out: Annotated[Path | None, typer.Option("--out", help="folder of the runs; default runs/twins/A-B")] = None,
    as_json: Json = False,
) -> None:
    """Train A and B with the same seeds, one pair after another, and stop as soon as the outcome is certain.

    Both runs of a pair draw the same prompts and random numbers, and are compared prompt by prompt. The test may be looked at
    after every pair. The same command continues after an interruption; finished runs are not repeated.
    """
    from hone.apps.lab import twins
    from hone.apps.lab.paired import Outcome
    from hone.cli.run_output import print_json
    from hone.errors import HoneError

    for file in (first, second):
        if not file.is_file():
            raise HoneError(f"no file '{file}'", fix="hone twins A.yaml B.yaml, two configuration files", code="E-runs")
    if margin <= 0:
        raise HoneError(f"--margin {margin:g} is not positive", fix="--margin 0.02", code="E-runs")
    out, given = out or Path("runs/twins") / f"{first.stem}-{second.stem}", list(overrides or ())
    configs = [_config(program, file, preset, given) for file in (first, second)]
    twins.open_record(out, configs)
    settings = twins.TwinsSettings(margin, confidence, max_pairs, metric)
    equal, pairs = twins.equal_configs(configs), []
    decision = twins.twins_decision(pairs, settings, equal)
    for seed in range(first_seed, first_seed + max_pairs):
        for arm, file in zip(twins.ARMS, (first, second), strict=True):
            _train(program, file, preset, given, seed, twins.pair_directory(out, seed, arm))
        pairs.append(twins.read_pair(out, seed, metric))
        decision = twins.twins_decision(pairs, settings, equal)
        if not as_json:
            typer.echo(_shown(pairs[-1]))
        if decision.outcome is not Outcome.STILL_NOISE:
            break
    verdict = twins.verdict_text(decision, pairs, settings)
    result = twins.write_outcome(out, pairs, decision, settings, verdict)
    if as_json:
        print_json(result)
    else:
        typer.echo(verdict)


def _config(program: Kind, file: Path, preset: str | None, overrides: list[str]) -> dict[str, Any]:
    from hone.config.environment import written_leaves
    from hone.config.load import load_config
    from hone.config.trees import TREES

    tree = TREES[program.value]
    config = load_config(tree, overrides, preset=preset, config_path=file.parent, config_name=file.name)
    return dict(written_leaves(config))


def _train(program: Kind, file: Path, preset: str | None, overrides: list[str], seed: int, directory: Path) -> None:
    from hone.cli import trials

    keys = trials.settings_of(program.value, directory, {"trainer.seed": seed})
    trial = trials.Trial((program.value, *trials.file_words(file, preset, [*overrides, *keys])), directory)
    if not trial.finished:
        typer.echo(f"training {directory}", err=True)
        trials.run_trial(trial)


def _shown(pair: TwinPair) -> str:
    measured = f"A {pair.first:.4g}, B {pair.second:.4g}, difference {pair.difference:+.4g}"
    return f"seed {pair.seed}: {measured} ({pair.score}, {pair.prompts} prompts)"
