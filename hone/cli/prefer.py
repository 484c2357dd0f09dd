"""`hone prefer`: preference optimisation."""

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
    """Train a model on preferences: pairs (dpo, ipo, orpo, simpo, cpo, ...) or labelled responses (kto).

    Precedence: defaults < --preset < your file < key=value. Example:
    hone prefer --preset dpo data.train_files=pairs/train.parquet model.path=MODEL
    """
    from hone.config import PreferenceConfig

    config, downloads = checked_config(PreferenceConfig, overrides, preset, config_path, config_name)
    if dry_run:
        return
    from hone.trainers.preference import train

    raise typer.Exit(run_training(config, downloads, train))
