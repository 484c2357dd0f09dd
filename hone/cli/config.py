"""`hone config`: show the resolved tree, explain a key, list presets."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from hone.cli.options import ConfigName, ConfigPath, Overrides, Preset

app = typer.Typer(add_completion=False, no_args_is_help=True)


class Kind(StrEnum):
    """The trees there are, by the command that takes them."""

    train = "train"
    sft = "sft"
    prefer = "prefer"
    reward_model = "reward-model"


Of = Annotated[Kind, typer.Option("--of", help="the command whose keys are meant")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback()
def group() -> None:
    """Show and explain configuration keys."""


@app.command("show")
def show(
    overrides: Overrides = None,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    of: Of = Kind.train,
    changed: Annotated[bool, typer.Option("--changed", help="only the keys that were set, and where")] = False,
    as_json: Json = False,
) -> None:
    """Print the configuration that a run with these arguments would have."""
    import dataclasses
    import json

    from hone.config import load_with_provenance, to_yaml
    from hone.config.keys import leaf_values

    config, provenance = load_with_provenance(
        _tree(of), overrides or [], preset=preset, config_path=config_path, config_name=config_name
    )
    if changed:
        rows = {path: value for path, value in leaf_values(config) if path in provenance}
        typer.echo(
            json.dumps({path: {"value": value, "from": provenance[path]} for path, value in rows.items()}, indent=2)
            if as_json
            else "\n".join(f"{path}={_text(value)}  # {provenance[path]}" for path, value in rows.items())
        )
    elif as_json:
        typer.echo(json.dumps(dataclasses.asdict(config), indent=2))
    else:
        typer.echo(to_yaml(config), nl=False)


@app.command("explain")
def explain(
    key: Annotated[str, typer.Argument(help="full key, its last parts, or a block")],
    of: Annotated[
        Kind | None, typer.Option("--of", help="the command whose keys are meant; both when left out")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a key means, what it takes and what it is by default."""
    import json

    from hone.config.keys import blocks, documentation
    from hone.config.suggest import unknown_key

    kinds = [of] if of else list(Kind)
    found = [(kind, doc) for kind in kinds for doc in documentation(_tree(kind)) if f".{doc.path}".endswith(f".{key}")]
    inside = [
        (kind, doc)
        for kind in kinds
        if key in blocks(_tree(kind))
        for doc in documentation(_tree(kind))
        if doc.path.startswith(f"{key}.")
    ]
    matches = inside or found
    if not matches:
        raise unknown_key(key, _tree(kinds[0]))
    if as_json:
        rows = [
            {
                "command": kind.value,
                "key": d.path,
                "type": d.type,
                "allowed": d.allowed,
                "default": d.default,
                "doc": d.doc,
            }
            for kind, d in matches
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for kind, doc in matches:
        allowed = f"; {doc.allowed}" if doc.allowed else ""
        typer.echo(f"{doc.path}  (hone {kind.value})")
        typer.echo(f"    {doc.doc}")
        typer.echo(f"    Takes {doc.type}{allowed}. Default: {_text(doc.default)}\n")


@app.command("presets")
def presets() -> None:
    """List the presets and what each one sets."""
    from hone.config.layers import PRESETS, preset_names
    from hone.config.trees import PRESET_KINDS

    for kind in Kind:
        folder = PRESET_KINDS[_tree(kind)]
        for name in preset_names(folder):
            text = (PRESETS / folder / f"{name}.yaml").read_text(encoding="utf-8")
            head, _, body = text.partition("\n")
            typer.echo(f"hone {kind.value} --preset {name}: {head.removeprefix('# ')}\n")
            typer.echo("\n".join(f"    {line}" for line in body.strip().splitlines()) + "\n")


def _tree(kind: Kind) -> Any:
    from hone.config import TREES

    return TREES[kind.value]


def _text(value: object) -> str:
    from hone.config.check import yaml_value

    return yaml_value(value)
