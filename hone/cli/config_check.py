"""`hone config check`: all checks before a run, without the run."""

from __future__ import annotations

from typing import Annotated

import typer

from hone.cli.options import ConfigName, ConfigPath, Json, Kind, Of, Overrides, Preset


def check(
    overrides: Overrides = None,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    kind: Of = Kind.train,
    keys_only: Annotated[
        bool,
        typer.Option("--keys-only", help="check only keys and their arithmetic, not files, rewards or this machine"),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run all checks of a run before its start: keys, arithmetic, files, template, reward, machine.

    Prints every finding, errors first. Exit code 0 when a run could start, 2 when not.
    """
    import json

    from hone.cli.programs import local_config
    from hone.config import TREES, load_config
    from hone.preflight import Stage, examine

    tree = TREES[kind.value]
    if keys_only:
        config = load_config(
            tree, overrides or [], preset=preset, config_path=config_path, config_name=config_name, by_method=True
        )
    else:
        config, _ = local_config(tree, overrides, preset, config_path, config_name)
    report = examine(config, (Stage.ARITHMETIC,) if keys_only else tuple(Stage))
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        errors, warnings = len(report.errors), len(report.warnings)
        counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        typer.echo("\n".join(part for part in (report.render(), counts) if part))
    if report.stops:
        raise typer.Exit(2)
