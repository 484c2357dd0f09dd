"""`hone train`: reinforcement learning."""

from __future__ import annotations

import typer

from hone.cli.options import ConfigName, ConfigPath, DryRun, Overrides, Preset

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    overrides: Overrides = None,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    dry_run: DryRun = False,
) -> None:
    """Train a model by reinforcement learning.

    Precedence: defaults < --preset < your file < key=value. Example:
    hone train --preset grpo data.train_files=train.parquet actor_rollout_ref.model.path=MODEL
    """
    from hone.config import RLConfig, load_config
    from hone.preflight import batch_plan, check, training_rows

    config = load_config(RLConfig, overrides or [], preset=preset, config_path=config_path, config_name=config_name)
    check(config)
    typer.echo(batch_plan(config, training_rows(config)))
    if dry_run:
        return
    from hone.trainers.rl import train

    raise typer.Exit(train(config))
