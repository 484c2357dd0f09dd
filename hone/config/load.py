"""Loading of a tree: compose layers, resolve interpolations, check every value; and comparison of two, key by key."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hone.config.check import Provenance, check_values, raise_together
from hone.config.derived import RunSpec
from hone.config.environment import environment_values, unresolved, written_leaves, written_tree
from hone.config.layers import Sources, compose, preset_names
from hone.config.tree import RLConfig
from hone.config.trees import PRESET_KINDS, AnyConfig
from hone.errors import ConfigError, did_you_mean

Tree = TypeVar("Tree", bound=AnyConfig)


def load_config(
    cls: type[Tree],
    overrides: Sequence[str] = (),
    *,
    preset: str | None = None,
    config_path: str | Path | None = None,
    config_name: str | None = None,
    by_method: bool = False,
) -> Tree:
    """Load the tree ``cls`` as plain, validated dataclasses with all interpolations resolved.

    Args:
        cls: one of :data:`hone.config.trees.TREES`, such as :class:`RLConfig`.
        overrides: command-line overrides in Hydra's grammar; they take precedence over all other layers.
        preset: a name in ``hone/config/presets/<kind>``; it takes precedence over the defaults.
        config_path: folder of a YAML file, which takes precedence over the preset. Default: the current folder, when
            ``config_name`` is given.
        config_name: name of that file, with or without ``.yaml``. Default ``config``, when ``config_path`` is given.
        by_method: without a preset and a file, begin with the preset of the method that ``algorithm.adv_estimator`` names.

    Raises:
        ConfigError: an unknown key, preset or file, a malformed override, a value of the wrong type or out of bounds,
            or an unresolvable interpolation; one error holds all mistakes.
    """
    return load_with_provenance(
        cls, overrides, preset=preset, config_path=config_path, config_name=config_name, by_method=by_method
    )[0]


def load_with_provenance(
    cls: type[Tree],
    overrides: Sequence[str] = (),
    *,
    preset: str | None = None,
    config_path: str | Path | None = None,
    config_name: str | None = None,
    by_method: bool = False,
) -> tuple[Tree, Provenance]:
    """Load like :func:`load_config`, and return the origin of each value that is not a default, too."""
    directory, name = _file(config_path, config_name)
    composed, provenance = compose(
        Sources(cls, PRESET_KINDS[cls], preset, directory, name, list(overrides), by_method and cls is RLConfig)
    )
    config = _resolved(composed)
    settle(config, provenance)
    raise_together(check_values(config, provenance))
    config._environment = environment_values(_raw(composed), config)
    return config, provenance


def to_yaml(config: Any) -> str:
    """Return a tree as YAML; loading that file gives the same tree. Values from the environment are interpolations."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(written_tree(config)))


def _file(config_path: str | Path | None, config_name: str | None) -> tuple[Path | None, str | None]:
    if config_path is None and config_name is None:
        return None, None
    directory = Path(config_path or ".").expanduser().absolute()
    if directory.is_file():
        raise ConfigError(
            f"{config_path} is a file, not a directory",
            where="--config-path",
            fix=f"--config-path {Path(config_path or '.').parent} --config-name {directory.stem}",
        )
    return directory, config_name or "config"


def _resolved(composed: Any) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        return OmegaConf.to_object(composed)
    except MissingMandatoryValue as error:
        key = str(getattr(error, "full_key", ""))
        raise ConfigError("the value is missing ('???')", where=key, fix=f"{key}=...") from error
    except OmegaConfBaseException as error:
        raise unresolved(error, getattr(error, "full_key", None) or "") from error


def _raw(composed: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(composed, resolve=False)


log = logging.getLogger("hone")

CORRECTION = "algorithm.rollout_correction"
ASYNC_CORRECTION = "decoupled_token_is"
"""Rollout correction of asynchronous training: old log-probs of the trainer, truncated importance weights per token."""


def settle(config: Any, provenance: Provenance) -> None:
    """Set what asynchronous training implies: an engine process of its own, and a rollout correction.

    ``provenance`` says which keys were set, and gets those that are set here.
    """
    if not isinstance(config, RLConfig) or not RunSpec(config).asynchronous:
        return
    keys = config.trainer.async_training
    origin = f"from trainer.async_training.{'max_staleness' if keys.max_staleness else 'stream'}"
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    if config.trainer.runtime == "local" and rollout.name == "native" and rollout.num_replicas is None:
        rollout.num_replicas = 1
        provenance["actor_rollout_ref.rollout.num_replicas"] = origin
    if keys.max_staleness and not any(key.startswith(CORRECTION) for key in provenance):
        correction.preset = ASYNC_CORRECTION
        provenance[f"{CORRECTION}.preset"] = origin
    values = ", ".join(
        f"{key.rpartition('.')[2]}={_value(config, key)}" for key in provenance if provenance[key] == origin
    )
    if values:
        log.info("%s: %s", origin, values)


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


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
