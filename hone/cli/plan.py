"""`hone plan`: memory, time and placement of a run before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.apps.lab.compare import find_run
from hone.cli.options import ConfigName, ConfigPath, Json, Kind, Of, Overrides, Preset
from hone.cli.output import new_console, print_json
from hone.cli.programs import local_config
from hone.config import TREES, RLConfig
from hone.errors import ConfigError


def plan(
    overrides: Overrides = None,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    kind: Of = Kind.train,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="find a placement on a cluster, for example 2x8xH100-80GB or 8xA100-80GB"),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="plan for a GPU by name, such as H100-80GB, instead of this machine")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="measure this machine again, and one micro-batch of the model")
    ] = False,
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", help="predict steps of a recorded run under synchronous and asynchronous schedules"),
    ] = None,
    root: Annotated[Path, typer.Option("--root", help="with --schedule: folder that holds the runs")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Predict memory by phase and the time of a step from the model's config.json; no weights are needed.

    Shows the keys that make a run fit, and with --cluster the placement of its roles. Exit code 0 when the run fits or can be
    made to fit, 2 when no key makes it fit. Example:
    hone plan --preset grpo --cluster 8xH100-80GB actor_rollout_ref.model.path=MODEL
    """
    if schedule is not None:
        _schedule(schedule, root, as_json=as_json)
        return
    from hone.preflight.plan.devices import device_named, local_device, measured_scale, parse_cluster
    from hone.preflight.plan.plan import as_json as plain
    from hone.preflight.plan.plan import plan_of, render, search

    nodes = parse_cluster(cluster) if cluster is not None else None
    named = nodes.device if nodes is not None else device_named(device) if device is not None else None
    config, _ = local_config(TREES[kind.value], overrides, preset, config_path, config_name, weights=False)
    if cluster is not None and not isinstance(config, RLConfig):
        raise ConfigError(
            f"`hone {kind.value}` has one pool of devices: there is no placement to search for",
            where="--cluster",
            fix="--device NAME plans for GPUs of that kind with the configured trainer.n_gpus_per_node and layout",
        )
    if nodes is not None and isinstance(config, RLConfig):
        plan = search(config, nodes)
    elif named is not None:
        plan = plan_of(config, named)
    else:
        scale = measured_scale(config) if measure else 1.0
        plan = plan_of(config, local_device(config, again=measure), activation_scale=scale)
    if as_json:
        print_json(plain(plan))
    else:
        typer.echo(render(plan))
    if not plan.fitting.fits:
        raise typer.Exit(2)


def _schedule(name: str, root: Path, *, as_json: bool) -> None:
    from dataclasses import asdict

    from hone.apps.lab.schedule import alternatives, back_test, measured_run, table

    run = measured_run(find_run(name, root))
    predicted, recorded = back_test(run)
    forecasts = alternatives(run)
    if as_json:
        check = {"predicted_step_seconds": predicted, "recorded_step_seconds": recorded}
        print_json({**check, "schedules": [asdict(one) for one in forecasts]})
        return
    sharing = "that engines and trainer have devices of their own in asynchronous training"
    if run.cores is not None:
        sharing = f"that work on the {run.cores.count} shared cores is 1.5 times as fast on twice the threads"
    new_console().print(table(forecasts))
    typer.echo(
        f"Check on the {len(run.held_out)} steps that the fit has not seen: predicted {predicted:.3g} s a step, was "
        f"{recorded:.3g} s in the median ({predicted / recorded - 1:+.0%}), {min(run.held_out):.3g} to {max(run.held_out):.3g} s.\n"
        f"Assumes {sharing}, and independent lengths."
    )
