"""`hone train`: reinforcement learning."""

from __future__ import annotations

from typing import Annotated

import typer

from hone.cli.options import ConfigName, ConfigPath, DryRun, Overrides, Preset
from hone.cli.programs import checked_config, run_training

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    overrides: Overrides = None,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    dry_run: DryRun = False,
    pilot: Annotated[
        bool,
        typer.Option("--pilot", help="answer 32 prompts, report lengths, pass rate and dead groups, train nothing"),
    ] = False,
) -> None:
    """Train a model by reinforcement learning.

    Precedence: defaults < --preset < your file < key=value. Example:
    hone train model.path=MODEL data.train_files=train.parquet
    trains by GRPO; algorithm.adv_estimator=rloo by RLOO, with the keys that belong to it.
    """
    from hone.config import RLConfig

    config, downloads = checked_config(RLConfig, overrides, preset, config_path, config_name)
    if pilot:
        from hone.trainers.pilot import describe, pilot_findings, run_pilot

        shown = run_pilot(config)
        typer.echo(describe(shown, config))
        for finding in pilot_findings(shown, config):
            typer.echo(f"{finding.severity} {finding.error.render()}")
    if dry_run or pilot:
        return
    from hone.trainers.rl import train

    raise typer.Exit(run_training(config, downloads, train))
