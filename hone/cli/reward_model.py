"""`hone reward-model`: a scalar reward model from preference pairs."""

from __future__ import annotations

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
) -> None:
    """Train a scalar reward model on preference pairs (Bradley-Terry).

    Its directory, checkpoints/step_N/actor, is a Hugging Face sequence classifier with one label; `hone train` uses it as
    reward.reward_model.path. Example:
    hone reward-model data.train_files=pairs/train.parquet model.path=MODEL
    """
    from hone.config import RewardModelConfig

    config, downloads = checked_config(RewardModelConfig, overrides, preset, config_path, config_name)
    if dry_run:
        return
    from hone.trainers.preference import train

    raise typer.Exit(run_training(config, downloads, train))
