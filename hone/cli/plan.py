"""`hone plan`: memory, time and placement of a run before it starts."""

from __future__ import annotations

from typing import Annotated

import typer

from hone.cli.options import ConfigName, ConfigPath, Json, Kind, Of, Overrides, Preset

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def command(
    overrides: Overrides = None,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    of: Of = Kind.train,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="find a placement on such devices, for example 2x8xH100-80GB or 8xA100-80GB"),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="a GPU by name in place of this machine's devices, such as H100-80GB")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="measure this machine anew")] = False,
    as_json: Json = False,
) -> None:
    """Predict memory by phase and the time of a step, from the model's config.json alone; no weights are needed.

    Says what makes a run fit that does not, and with --cluster where its roles should live. Exit code 0 when it fits (or can
    be made to), 2 when no key makes it fit. Example:
    hone plan --preset grpo --cluster 8xH100-80GB actor_rollout_ref.model.path=MODEL
    """
    import json

    from hone.config import TREES, RLConfig, load_config
    from hone.errors import ConfigError
    from hone.preflight.plan.devices import device_named, parse_cluster
    from hone.preflight.plan.local import local_device
    from hone.preflight.plan.plan import as_json as plain
    from hone.preflight.plan.plan import plan_of, search
    from hone.preflight.plan.render import render

    config = load_config(
        TREES[of.value], overrides or [], preset=preset, config_path=config_path, config_name=config_name
    )
    if cluster is not None and not isinstance(config, RLConfig):
        raise ConfigError(
            f"`hone {of.value}` runs in one process, there is nothing to place",
            where="--cluster",
            fix="leave --cluster out; --device NAME plans for a GPU",
        )
    if cluster is not None and isinstance(config, RLConfig):
        found = search(config, parse_cluster(cluster))
    else:
        found = plan_of(config, device_named(device) if device else local_device(config, again=measure))
    typer.echo(json.dumps(plain(found), indent=2) if as_json else render(found))
    if not found.fitting.fits:
        raise typer.Exit(2)
