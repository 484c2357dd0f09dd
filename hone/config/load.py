"""Loading of a tree: compose layers, resolve interpolations, check every value; and comparison of two, key by key.

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
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hone.config.algorithm import AlgorithmConfig
from hone.config.derived import RunSpec
from hone.config.environment import environment_values, unresolved, written_leaves, written_tree
from hone.config.keys import (
    TYPE_WORDS,
    KeyDoc,
    Provenance,
    blocks,
    check_values,
    complaints,
    documentation,
    key_named,
    leaf_of,
    place,
    raise_together,
    unknown_key,
    wrong_type,
)
from hone.config.migration.reading import (
    Outcome,
    means_another,
    outcome_text,
    read_setting,
    translate_overrides,
    trl_error,
    trl_setting,
    unsupported,
)
from hone.config.migration.table import TABLES
from hone.config.overrides import COMMAND_LINE, hydra_value, one_line, override_value, parse_overrides
from hone.config.reward import reward_keys
from hone.config.tree import RLConfig
from hone.config.trees import PRESET_KINDS, AnyConfig
from hone.errors import ConfigError, did_you_mean
from hone.text import read_yaml

log = logging.getLogger("hone.config")

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


CORRECTION = "algorithm.rollout_correction"
ASYNC_CORRECTION = "decoupled_token_is"
"""Rollout correction of asynchronous training: old log-probs of the trainer, truncated importance weights per token."""


def settle(config: Any, provenance: Provenance) -> None:
    """Set what asynchronous training implies (an engine process of its own, a rollout correction), and shorten warm-ups.

    ``provenance`` says which keys were set, and gets those that are set here.
    """
    _shorten_warm_up(config, provenance)
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


def _shorten_warm_up(config: Any, provenance: Provenance) -> None:
    """Shorten a warm-up of a preset or file that is as long as the run, whose steps were set elsewhere."""
    steps, where = config.trainer.total_training_steps, provenance.get("trainer.total_training_steps")
    for key in [key for key in provenance if key.endswith("optim.lr_warmup_steps")]:
        optim, origin = _value(config, key.rpartition(".")[0]), provenance[key]
        if steps is not None and optim.lr_warmup_steps >= steps and origin not in (COMMAND_LINE, where):
            log.info("%s=%d, not %d (%s): the run has %d steps", key, steps // 10, optim.lr_warmup_steps, origin, steps)
            optim.lr_warmup_steps, provenance[key] = steps // 10, f"{where}, which has {steps} steps"


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


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
    groups = _groups(sources.directory, overrides) if sources.directory else []
    overrides = [
        full for override in overrides if override not in groups for full in _with_full_keys(override, sources.schema)
    ]
    layers = []
    if sources.by_method and not sources.preset and not sources.directory:
        estimator, values = _method(overrides)
        layers.append(values)
        inspection.layer(values, f"from adv_estimator={estimator}")
    if sources.preset:
        layers.append(_preset(sources.kind, sources.preset))
        inspection.layer(layers[-1], f"preset {sources.preset}")
    if sources.directory:
        lines = [str(override.input_line) for override in groups]
        name = str(sources.name).removesuffix(".yaml")
        layers.append(_composed(sources.directory, name, lines, sources.file_label))
        inspection.layer(layers[-1], sources.file_label)
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
    if isinstance(given, int) and isinstance(mini, int) and given > 0:
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


def _with_full_keys(override: Override, schema: type) -> list[Override]:
    key = full_key(override.key_or_group, schema)
    value = override_value(override) if key == "reward" and key in blocks(schema) else None
    if value and isinstance(value, str | list):
        return parse_overrides([f"{path}={hydra_value(item)}" for path, item in reward_keys(value).items()])[0]
    if key == override.key_or_group:
        return [override]
    line = str(override.input_line).replace(override.key_or_group, key, 1)
    return [dataclasses.replace(override, key_or_group=key, input_line=line)]


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


def is_group(override: Override) -> bool:
    """Return whether an override chooses a file of a config group in the user's directory (``model=small``)."""
    from hydra.core.global_hydra import GlobalHydra

    return bool(GlobalHydra.instance().config_loader().get_group_options(override.key_or_group))


def apply(override: Override, tree: DictConfig) -> None:
    """Apply an override to a tree: ``key=value`` sets, ``+key=value`` adds, ``++key=value`` sets or adds, ``~key`` removes.

    Raises:
        ConfigError: a key to add exists, a key to remove does not exist, or a group does not exist.
        OmegaConfBaseException: the value does not fit.
    """
    from omegaconf import OmegaConf, open_dict

    key, value, line = override.key_or_group, override.value(), str(override.input_line)
    if override.package is not None:
        fix = f"{key}=... sets the key; a group is a folder of files in the folder of --config-path"
        raise ConfigError(f"the group '{key}' does not exist", where=line, fix=fix)
    looks = override.is_delete() or override.is_add()  # a replaced value may be an unresolvable interpolation
    present = OmegaConf.select(tree, key, throw_on_missing=False) if looks else None
    if override.is_delete():
        if present is None or value not in (None, present):
            state = f"{key} is {present!r}" if present is not None else f"{key} does not exist"
            raise ConfigError(
                f"nothing to remove: {state}", where=line, fix=f"~{key}" if present is not None else f"remove {line}"
            )
        mapping, _, name = key.rpartition(".")
        with open_dict(tree):
            del OmegaConf.select(tree, mapping)[name]
        return
    if override.is_add() and present is not None and not isinstance(value, dict | list):
        raise ConfigError(f"{key} already exists: {present!r}", where=line, fix=f"{line.removeprefix('+')} (without +)")
    OmegaConf.update(tree, key, value, merge=True, force_add=override.is_add() or override.is_force_add())


SHORT_BLOCKS: dict[type, dict[str, str]] = {
    RLConfig: {"model": "actor_rollout_ref.model", "trainer.async": "trainer.async_training"}
}
"""Block of each short name, by tree: ``hone train model.path=DIR`` is the policy's model, as in the other commands."""


def with_whole_block(key: str, schema: type) -> str:
    """Return the key with its block's whole name.

    >>> with_whole_block("model.path", RLConfig)
    'actor_rollout_ref.model.path'
    """
    short = SHORT_BLOCKS.get(schema, {})
    block = next((name for name in short if key.startswith(f"{name}.")), None)
    return key if block is None else short[block] + key.removeprefix(block)


PYTHON_NAMES = {"steps": "trainer.total_training_steps", "out": "trainer.default_local_dir"}
"""Key of each argument of ``hone.train`` that has a name of its own."""


def full_key(name: str, schema: type) -> str:
    """Return the key that a name means: an argument of ``hone.train``, or the end of a key; any other name unchanged.

    >>> full_key("lr", RLConfig), full_key("optim.lr", RLConfig), full_key("beta", RLConfig)  # beta is of TRL
    ('actor_rollout_ref.actor.optim.lr', 'actor_rollout_ref.actor.optim.lr', 'beta')
    >>> full_key("steps", RLConfig)
    'trainer.total_training_steps'
    """
    if name in PYTHON_NAMES and leaf_of(PYTHON_NAMES[name], schema):
        return PYTHON_NAMES[name]
    key = with_whole_block(name, schema)
    foreign = schema in TABLES and TABLES[schema].find(key) is not None
    if key != name or foreign or leaf_of(key, schema) or key in blocks(schema) or means_another(key, schema):
        return key
    with suppress(ConfigError):  # several are equally near: the name stays unknown, and R09 proposes them
        return key_named(key, schema) or key
    return key


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


if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig


class Inspection:
    """Collect the keys that the layers set, in order of precedence, and every mistake in them.

    Attributes:
        provenance: origin of the last value of each key.
        problems: errors so far.
    """

    def __init__(self, schema: type) -> None:
        self.schema = schema
        self.provenance: Provenance = {}
        self.problems: list[ConfigError] = []
        self._keys = {key.path: key for key in documentation(schema)}
        self._written: dict[str, Any] = {}
        self._trial = _trial(schema)

    def layer(self, tree: Any, origin: str) -> None:
        """Inspect a preset or file, given as nested dicts."""
        for path, value in _leaves(tree, self.schema, ""):
            self._set(path, value, origin)

    def command_line(self, overrides: list[Override]) -> list[Override]:
        """Inspect overrides and return those without mistakes, in the form to apply."""
        return [valid for override in overrides if (valid := self._override(override)) is not None]

    def finish(self) -> None:
        """Raise all problems, together with the values that are out of bounds."""
        if self.problems:
            for path, value in self._written.items():
                self.problems += complaints(self._keys[path], value, self.provenance[path])
        raise_together(self.problems)

    def _override(self, override: Override) -> Override | None:
        from hydra.core.override_parser.types import OverrideType

        path, value = override.key_or_group, override_value(override)
        leaf = leaf_of(path, self.schema)
        inside_mapping = leaf is not None and leaf.path != path
        if override.is_delete() and not inside_mapping:
            self.problems.append(self._undeletable(path, leaf))
            return None
        before = len(self.problems)
        for key, item in self._spread(path, value):
            self._set(key, item, COMMAND_LINE)
        if len(self.problems) > before:
            return None
        # A mapping accepts any key: a plain `=` may add one, although Hydra alone requires a `+`.
        free = inside_mapping or (leaf is not None and leaf.type == TYPE_WORDS[dict])
        adds = free and override.type is OverrideType.CHANGE
        return dataclasses.replace(override, type=OverrideType.FORCE_ADD) if adds else override

    def _spread(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the leaves of ``path=value``; a block given as a mapping has several."""
        if path in blocks(self.schema) and isinstance(value, dict):
            yield from _leaves(value, self.schema, f"{path}.")
        else:
            yield path, value

    def _set(self, path: str, value: Any, origin: str) -> None:
        """Record that ``path`` is set to ``value``, or the problem with it."""
        problem = self._problem(path, value, origin)
        if problem is not None:
            self.problems.append(problem)
            return
        leaf = leaf_of(path, self.schema)
        self.provenance[leaf.path if leaf else path] = origin
        self._written.pop(path, None)
        if path in self._keys and not _is_interpolation(value):
            self._written[path] = value

    def _problem(self, path: str, value: Any, origin: str) -> ConfigError | None:
        if path in blocks(self.schema):
            return None if _is_interpolation(value) else self._block_as_value(path, value, origin)
        leaf = leaf_of(path, self.schema)
        if leaf is None:
            return self._unknown_or_foreign(path, value, origin)
        return None if leaf.path != path or self._fits(leaf, value) else wrong_type(leaf, value, origin)

    def _unknown_or_foreign(self, path: str, value: Any, origin: str) -> ConfigError:
        """Return the error for a key that the tree does not have; it may be a name of verl or TRL."""
        reading = read_setting(path, value, {}, self.schema)
        name = path.rpartition(".")[2]
        known = trl_setting(name, value, {}, self.schema) if means_another(name, self.schema) else None
        if reading.outcome is Outcome.UNKNOWN and known is not None:
            return trl_error(known, origin)
        if reading.outcome is Outcome.UNKNOWN:
            return unknown_key(path, self.schema, origin=origin)
        if reading.outcome is Outcome.UNSUPPORTED:
            return unsupported(reading, place(path, value, origin))
        return ConfigError(
            f"{path} is a key of verl ({origin}); in Hone: {outcome_text(reading)}",
            why="a configuration file of Hone must use Hone's keys",
            fix="use Hone's key, or translate the whole file with `hone config import FILE`",
            code="R09",
        )

    def _fits(self, key: KeyDoc, value: Any) -> bool:
        """Return whether a value can be converted to the type of the key."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            OmegaConf.update(self._trial, key.path, value, merge=True)
        except (OmegaConfBaseException, ValueError):
            return False
        return True

    def _block_as_value(self, path: str, value: Any, origin: str) -> ConfigError:
        inside = [key for key in self._keys if key.startswith(f"{path}.")]
        return ConfigError(
            f"{path} is a block of keys and cannot be set to {value!r} ({origin})",
            fix=f"set a key of it: {', '.join(inside[:6])}{', ...' if len(inside) > 6 else ''}",
            code="R11",
        )

    def _undeletable(self, path: str, leaf: KeyDoc | None) -> ConfigError:
        if leaf is None:
            return unknown_key(path, self.schema, origin=COMMAND_LINE)
        return ConfigError(
            f"{path} is a key of the tree and cannot be removed",
            fix=f"{path}=null" if "null" in leaf.type else f"leave it at its default, or set {path}=...",
            where=f"~{path}",
        )


def typed_tree(schema: type) -> DictConfig:
    return pickle.loads(_pickled_tree(schema))  # a third of the time of a deep copy


@functools.cache
def _pickled_tree(schema: type) -> bytes:
    from omegaconf import OmegaConf

    return pickle.dumps(OmegaConf.structured(schema))


@functools.cache
def _trial(schema: type) -> DictConfig:
    """Return a scratch tree to test whether values fit; its content has no meaning."""
    return typed_tree(schema)


def _leaves(tree: dict[Any, Any], schema: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, value)`` of the leaves that a layer sets, and of unknown keys."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and (path in blocks(schema) or (_holds_foreign_keys(path, value, schema))):
            yield from _leaves(value, schema, f"{path}.")
        else:
            yield path, value


def _holds_foreign_keys(path: str, tree: dict[Any, Any], schema: type) -> bool:
    """Return whether a mapping that the schema does not have contains keys of verl."""
    if leaf_of(path, schema) is not None:
        return False
    return any(
        _holds_foreign_keys(f"{path}.{name}", value, schema)
        if isinstance(value, dict)
        else read_setting(f"{path}.{name}", value, {}, schema).outcome is not Outcome.UNKNOWN
        for name, value in tree.items()
    )


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


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
