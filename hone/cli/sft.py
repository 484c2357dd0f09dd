"""`hone sft`: supervised fine-tuning."""

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
    """Fine-tune a model on conversations; the loss counts assistant tokens only.

    Precedence: defaults < --preset < your file < key=value. Example:
    hone sft data.train_files=train.parquet model.path=MODEL optim.lr=1e-4
    """
    from hone.config import SFTConfig, load_config
    from hone.preflight import batch_plan, check, training_rows

    config = load_config(SFTConfig, overrides or [], preset=preset, config_path=config_path, config_name=config_name)
    check(config)
    typer.echo(batch_plan(config, training_rows(config)))
    if dry_run:
        return
    from hone.trainers.sft import train

    raise typer.Exit(train(config))
