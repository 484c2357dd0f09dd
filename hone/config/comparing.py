"""Comparison of two configurations key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hone.config.environment import written_leaves
from hone.config.layers import preset_names
from hone.config.load import load_config
from hone.config.trees import PRESET_KINDS
from hone.errors import ConfigError, did_you_mean

_MISSING = "(missing)"


def read_config(name: str, tree: type) -> dict[str, Any]:
    """Return the keys and values of a YAML file, a run directory, a checkpoint or a preset.

    Raises ConfigError: nothing has that name, or its configuration is invalid.
    """
    path = Path(name).expanduser()
    file = path / "config.yaml" if path.is_dir() else path
    if file.is_file():
        config = load_config(tree, config_path=file.parent, config_name=file.name)
    elif name in preset_names(PRESET_KINDS[tree]):
        config = load_config(tree, preset=name)
    else:
        raise ConfigError(
            f"'{name}' is not a YAML file, run directory or preset",
            fix=did_you_mean(name, preset_names(PRESET_KINDS[tree])),
        )
    return dict(written_leaves(config))


def differences(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = [*first, *(key for key in second if key not in first)]
    pairs = {key: (first.get(key, _MISSING), second.get(key, _MISSING)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
