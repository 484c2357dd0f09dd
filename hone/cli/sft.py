"""`hone sft`: supervised fine-tuning."""

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
    """Fine-tune a model on conversations; the loss counts assistant tokens only.

    Precedence: defaults < --preset < your file < key=value. Example:
    hone sft data.train_files=train.parquet model.path=MODEL optim.lr=1e-4
    """
    from hone.config import SFTConfig

    config, downloads = checked_config(SFTConfig, overrides, preset, config_path, config_name)
    if dry_run:
        return
    from hone.trainers.sft import train

    raise typer.Exit(run_training(config, downloads, train))
