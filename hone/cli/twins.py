"""`hone twins`: train two configurations in pairs until one is better, or they are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.options import Json, Kind, Of, Overrides, Preset

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
    from hone.cli.trials import Trial, file_words, run_trial, settings_of
    from hone.config.environment import written_leaves
    from hone.config.load import load_config
    from hone.config.trees import TREES
    from hone.errors import HoneError
    from hone.insight import twins
    from hone.insight.comparison.sequential import Outcome

    for file in (first, second):
        if not file.is_file():
            raise HoneError(f"no file '{file}'", fix="hone twins A.yaml B.yaml, two configuration files", code="E-runs")
    if margin <= 0:
        raise HoneError(f"--margin {margin:g} is not positive", fix="--margin 0.02", code="E-runs")
    files, given = (first, second), list(overrides or ())
    configs = [
        dict(
            written_leaves(
                load_config(TREES[program.value], given, preset=preset, config_path=f.parent, config_name=f.name)
            )
        )
        for f in files
    ]
    out = out or Path("runs/twins") / f"{first.stem}-{second.stem}"
    settings = twins.TwinsSettings(margin, confidence, max_pairs, metric)
    twins.open_record(out, configs)
    equal, pairs = twins.equal_configs(configs), []
    decision = twins.twins_decision(pairs, settings, equal)
    for seed in range(first_seed, first_seed + max_pairs):
        for arm, file in zip(twins.ARMS, files, strict=True):
            directory = twins.pair_directory(out, seed, arm)
            keys = settings_of(program.value, directory, {"trainer.seed": seed})
            trial = Trial((program.value, *file_words(file, preset, [*given, *keys])), directory)
            if not trial.finished:
                typer.echo(f"training {directory}", err=True)
                run_trial(trial)
        pair = twins.read_pair(out, seed, metric)
        pairs.append(pair)
        decision = twins.twins_decision(pairs, settings, equal)
        if not as_json:
            measured = f"A {pair.first:.4g}, B {pair.second:.4g}, difference {pair.difference:+.4g}"
            typer.echo(f"seed {seed}: {measured} ({pair.score}, {pair.prompts} prompts)")
        if decision.outcome is not Outcome.STILL_NOISE:
            break
    verdict = twins.verdict_text(decision, pairs, settings)
    result = twins.write_outcome(out, pairs, decision, settings, verdict)
    if as_json:
        from hone.cli.run_output import print_json

        print_json(result)
    else:
        typer.echo(verdict)
