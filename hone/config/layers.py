"""Composition of a tree from its defaults, a preset, a file and the command line.

Precedence, weakest first::

    dataclass defaults  <  preset (hone/config/presets), or that of the method  <  file (--config-path, --config-name)  <  command line

A run of ``hone train`` without a preset and a file begins with the preset of the method that ``algorithm.adv_estimator`` names.

Hydra composes a preset or a file, with its defaults list and the chosen groups, and reads the command line, so its grammar
(``key=value``, ``+``, ``++``, ``~``, quoting) and its interpolations work as documented there. Each layer is read separately without
the schema, to record the origin of each value and to report all mistakes at once. Valid values are then merged over the defaults of
the dataclasses, which give every value its type.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.config.algorithm import AlgorithmConfig
from hone.config.check import Provenance
from hone.config.environment import written_leaves
from hone.config.inspection import Inspection, typed_tree
from hone.config.keys import documentation
from hone.config.migration.reading import translate_overrides
from hone.config.overrides import apply, is_group, one_line, override_value, parse_overrides
from hone.config.tree import RLConfig
from hone.errors import ConfigError, did_you_mean
from hone.text import read_yaml

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig


log = logging.getLogger("hone.config")

PRESETS = Path(__file__).parent / "presets"
DEFAULT_ESTIMATOR = AlgorithmConfig().adv_estimator
_PRESET_OF = {"gae": "ppo", "grpo_passk": "passk", "optimal_token_baseline": "otb"}
"""Preset of an estimator with another name."""
_OVERRIDE_FIX = "key=value sets a key, ++key=value also adds one to a mapping, ~key removes one from a mapping"
_FILE_FIX = "a config file is a mapping of blocks in UTF-8; its defaults list, if any, names files that exist"


@dataclass(frozen=True)
class Sources:
    """Sources of the values of a tree."""

    schema: type
    kind: str  # folder of its presets ("rl", "sft")
    preset: str | None  # name of a preset of that kind
    directory: Path | None  # absolute folder of the user's file; None without a file
    name: str | None  # name of that file, with or without ``.yaml``
    overrides: list[str]  # command-line overrides in Hydra's grammar
    by_method: bool = False  # without a preset and a file, begin with the preset of the method

    @property
    def file_label(self) -> str:
        return f"file {Path(str(self.directory)) / str(self.name).removesuffix('.yaml')}.yaml"


def preset_names(kind: str) -> list[str]:
    return sorted(path.stem for path in (PRESETS / kind).glob("*.yaml"))


def compose(sources: Sources) -> tuple[DictConfig, Provenance]:
    """Compose the layers.

    Returns the composed tree (interpolations not yet resolved), and the origin of each value that was set. Raises
    ConfigError: all mistakes in the layers; a preset or file that is missing or cannot be read is reported alone,
    because nothing can be composed then.
    """
    from omegaconf import OmegaConf

    _check_sources(sources)
    inspection = Inspection(sources.schema)
    overrides, malformed = parse_overrides(sources.overrides)
    inspection.problems += malformed
    overrides = [_with_full_key(override, sources.schema) for override in overrides]
    layers = []
    if sources.by_method and not sources.preset and not sources.directory:
        estimator, values = _method(overrides)
        layers.append(values)
        inspection.layer(values, f"from adv_estimator={estimator}")
    if sources.preset:
        layers.append(_preset(sources.kind, sources.preset))
        inspection.layer(layers[-1], f"preset {sources.preset}")
    if sources.directory:
        groups = _groups(sources.directory, overrides)
        lines = [str(override.input_line) for override in groups]
        name = str(sources.name).removesuffix(".yaml")
        layers.append(_composed(sources.directory, name, lines, sources.file_label))
        inspection.layer(layers[-1], sources.file_label)
        overrides = [override for override in overrides if override not in groups]
    translated, unsupported = translate_overrides(overrides, sources.schema)
    inspection.problems += unsupported
    translated = inspection.command_line(translated)
    inspection.finish()
    tree = typed_tree(sources.schema)
    with _as_config_error("the configuration"):
        tree.merge_with(*layers)
    OmegaConf.set_struct(tree, True)
    _announce(inspection.provenance, tree)
    for override in translated:
        with _as_config_error(str(override.input_line), _OVERRIDE_FIX):
            apply(override, tree)
    return tree, inspection.provenance


def method_preset(estimator: str) -> str | None:
    """Return the preset of the method that an advantage estimator names; None if it has none.

    An estimator of the user's own (``module:name``) begins with the preset of the default one.
    """
    name = DEFAULT_ESTIMATOR if ":" in estimator else _PRESET_OF.get(estimator, estimator)
    return name if name in preset_names("rl") else None


def _method(overrides: list[Override]) -> tuple[str, dict[Any, Any]]:
    """Return the estimator of the command line, and the values of its method.

    Where the command line gives another batch size, the mini-batch keeps its share of it.
    """
    values = {override.key_or_group: override_value(override) for override in overrides}
    estimator = str(values.get("algorithm.adv_estimator", DEFAULT_ESTIMATOR))
    preset = method_preset(estimator)
    if preset is None:
        return estimator, {}
    tree = copy.deepcopy(_preset("rl", preset))
    size, actor = tree["data"]["train_batch_size"], tree["actor_rollout_ref"]["actor"]
    given, mini = values.get("data.train_batch_size"), actor.get("ppo_mini_batch_size")
    if isinstance(given, int) and isinstance(mini, int):
        updates = max(1, size // mini)
        actor["ppo_mini_batch_size"] = max(1, given // updates) if given % updates == 0 else given
    return estimator, tree


def _announce(provenance: Provenance, tree: DictConfig) -> None:
    """Log the values that a method sets, unless the command line sets them."""
    from omegaconf import OmegaConf

    label = next((origin for origin in provenance.values() if origin.startswith("from adv_estimator=")), None)
    if label is None:
        return
    chosen = [key for key, origin in provenance.items() if origin == label and key != "algorithm.adv_estimator"]
    shown = ", ".join(f"{key}={OmegaConf.select(tree, key)}" for key in chosen)
    log.info("%s: %s", label, shown)


def _with_full_key(override: Override, schema: type) -> Override:
    key = full_key(override.key_or_group, schema)
    if key == override.key_or_group:
        return override
    line = str(override.input_line).replace(override.key_or_group, key, 1)
    return dataclasses.replace(override, key_or_group=key, input_line=line)


def _check_sources(sources: Sources) -> None:
    known = preset_names(sources.kind)
    if sources.preset and sources.preset not in known:
        raise ConfigError(
            f"unknown preset '{sources.preset}'", where="--preset", fix=did_you_mean(sources.preset, known)
        )
    if sources.directory is None:
        return
    file = sources.directory / f"{str(sources.name).removesuffix('.yaml')}.yaml"
    if not file.is_file():
        here = sorted(path.stem for path in sources.directory.glob("*.yaml")) if sources.directory.is_dir() else []
        raise ConfigError(
            f"file {file} does not exist"
            if sources.directory.is_dir()
            else f"directory {sources.directory} does not exist",
            where="--config-path, --config-name",
            fix=did_you_mean(str(sources.name), here)
            if here
            else "--config-path DIR --config-name NAME of a YAML file",
        )


def _groups(directory: Path, overrides: list[Override]) -> list[Override]:
    """Return the overrides that choose a file of a config group in a directory."""
    possible = [override for override in overrides if "." not in override.key_or_group]
    if not possible:
        return []
    with _hydra(directory):
        return [override for override in possible if is_group(override)]


@contextmanager
def _hydra(directory: Path) -> Iterator[None]:
    """Let Hydra find files in ``directory`` and the presets within the context."""
    from hydra import initialize_config_dir

    with initialize_config_dir(config_dir=str(directory.absolute()), job_name="hone", version_base="1.3"):
        yield


@functools.cache
def _preset(kind: str, name: str) -> dict[Any, Any]:
    """Return the content of a preset as nested dicts, which must not be changed."""
    return _composed(PRESETS, f"{kind}/{name}", [], f"preset {name}")


def _composed(directory: Path, name: str, lines: list[str], what: str) -> dict[Any, Any]:
    """Compose a file, with the ``lines`` that choose groups for it; errors become one ConfigError about ``what``."""
    with _as_config_error(what):
        content = None if lines else _plain_content(directory / f"{name}.yaml")
        return _composed_by_hydra(directory, name, lines) if content is None else content


def _plain_content(file: Path) -> dict[Any, Any] | None:
    """Return the content of a file that Hydra would leave as it is, which takes a tenth of a second; None for another one."""
    from omegaconf import DictConfig, OmegaConf

    read_yaml(file.read_text("utf-8"))  # refuses aliases that grow
    loaded = OmegaConf.load(file)
    if not isinstance(loaded, DictConfig) or "defaults" in loaded or "hydra" in loaded:
        return None
    if "@package" in file.read_text("utf-8"):
        return None
    return OmegaConf.to_container(loaded)  # type: ignore[return-value]


def _composed_by_hydra(directory: Path, name: str, lines: list[str]) -> dict[Any, Any]:
    from hydra import compose as hydra_compose
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    layers = [f"{name}@_global_", "_self_"]
    node = OmegaConf.create({"hydra": {"searchpath": [f"file://{PRESETS.parent}"]}, "defaults": layers})
    ConfigStore.instance().store(name="hone_run", node=node)
    with _hydra(directory):
        return OmegaConf.to_container(hydra_compose(config_name="hone_run", overrides=lines))  # type: ignore[return-value]


@contextmanager
def _as_config_error(what: str, fix: str = _FILE_FIX) -> Iterator[None]:
    """Convert errors of the libraries within the context to a ConfigError about ``what``."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except YAMLError as error:
        raise ConfigError(f"{what} is not valid YAML: {one_line(error)}", fix="correct the line") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{what} cannot be composed: {one_line(error)}", fix=fix) from error


SHORT_BLOCKS: dict[type, dict[str, str]] = {
    RLConfig: {"model": "actor_rollout_ref.model", "trainer.async": "trainer.async_training"}
}
"""Block of each short name, by tree: ``hone train model.path=DIR`` is the policy's model, as in the other commands."""


def full_key(key: str, schema: type) -> str:
    """Return the key that a name means; any other name unchanged.

    >>> full_key("model.path", RLConfig)
    'actor_rollout_ref.model.path'
    """
    blocks = SHORT_BLOCKS.get(schema, {})
    block = next((name for name in blocks if key.startswith(f"{name}.")), None)
    return key if block is None else blocks[block] + key.removeprefix(block)


DEFAULT, DERIVED = "default", "derived"


def explained(config: Any, provenance: Provenance) -> Iterator[tuple[str, Any, str]]:
    """Yield ``(path, value, source)`` of every key: its origin, ``default``, or ``derived from`` other keys.

    Values from the environment are interpolations. A default that refers to other keys (``runs/${trainer.project_name}``) is derived from them.
    """
    defaults = {key.path: key.default for key in documentation(type(config))}
    for path, value in written_leaves(config):
        default = defaults[path]
        if path in provenance:
            yield path, value, provenance[path]
        elif isinstance(default, str) and "${" in default:
            yield path, value, f"{DERIVED} from {default}"
        else:
            yield path, value, DEFAULT
