"""`hone doctor`: checks of this machine, and of a configuration on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import ConfigName, ConfigPath, Json, Overrides, Preset
from hone.cli.output import print_json
from hone.cli.programs import local_config
from hone.config import RLConfig
from hone.errors import ConfigError

if TYPE_CHECKING:
    from hone.preflight import Report
    from hone.preflight.doctor import Check


def doctor(
    overrides: Overrides = None,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    rules: Annotated[bool, typer.Option("--rules", help="list all codes, with what each one checks")] = False,
    model: Annotated[
        str | None,
        typer.Option("--for", help="say what hardware is enough for a model: a directory or a name on the hub"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check versions, devices, limits, disk, ports, leftover processes, packages and credentials, each with its fix.

    With key=value, a preset or a file, every rule is also run for that `hone train` configuration. Exit code 2 when there is an
    error. Example: hone doctor --preset grpo actor_rollout_ref.model.path=MODEL data.train_files=train.parquet
    """
    if rules:
        _print_rules(as_json)
        return
    if model is not None:
        if overrides or preset or config_path or config_name:
            raise ConfigError(
                "--for plans the defaults of several methods", where="--for", fix="hone plan with your keys"
            )
        _print_enough(model, as_json)
        return
    from hone.preflight import examine
    from hone.preflight.doctor import ERROR, diagnose, worst

    report = None
    if overrides or preset or config_path or config_name:
        config, _ = local_config(RLConfig, overrides, preset, config_path, config_name)
        report = examine(config)
    checks = diagnose()
    if as_json:
        result: dict[str, Any] = {"status": worst(checks), "checks": [check.as_json() for check in checks]}
        print_json(result | (report.as_json() if report else {}))
    else:
        _print(checks, report)
    if worst(checks) == ERROR or (report is not None and report.stops):
        raise typer.Exit(2)


def _print(checks: list[Check], report: Report | None) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    colours = {"ok": "green", "absent": "dim", "warning": "yellow", "error": "bold red"}
    width = max(len(check.name) for check in checks)
    for check in checks:
        console.print(
            Text.assemble((f"{check.status:<8}", colours[check.status]), f"{check.name:<{width}}  {check.result}")
        )
        if check.fix:
            console.print(Text(f"{'':<8}{'':<{width}}  Fix: {check.fix}"))
    counts = {status: sum(check.status == status for check in checks) for status in ("error", "warning")}
    console.print(f"\n{counts['error']} errors, {counts['warning']} warnings")
    if report is not None:
        console.print(Text(report.render() or "this configuration has no problems"))


def _print_enough(model: str, as_json: bool) -> None:
    from hone.cli.output import new_console, new_table
    from hone.errors import ModelError
    from hone.preflight.plan.enough import COUNTS, GPUS, METHODS, enough

    config, _ = local_config(RLConfig, [f"actor_rollout_ref.model.path={model!r}"], None, None, None, weights=False)
    try:
        answers = list(enough(str(config.actor_rollout_ref.model.path)))
    except ModelError as error:
        error.where, error.fix = "--for", error.fix and error.fix.rpartition("path=")[2]
        raise
    if as_json:
        print_json([one.as_json() for one in answers])
        return
    table = new_table("method", *(f"{gpu}>" for gpu in GPUS))
    for method in METHODS:
        cells = [one.devices for one in answers if one.method == method]
        table.add_row(method, *("no" if count is None else str(count) for count in cells))
    new_console().print(table)
    typer.echo(
        f"fewest GPUs of one node (of {', '.join(map(str, COUNTS))}), with default batches and lengths; predicted, not measured.\n"
        "--json names the keys that make each run fit, and its peak; hone plan --cluster 1xH100-80GB plans your own run"
    )


def _print_rules(as_json: bool) -> None:
    import dataclasses

    from hone.preflight.rules import index

    entries = index()
    if as_json:
        print_json([dataclasses.asdict(entry) for entry in entries])
        return
    for entry in entries:
        typer.echo(f"{entry.code}  {entry.when:<12}{entry.question}")
