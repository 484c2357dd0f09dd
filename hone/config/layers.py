"""Hydra's part: composing a tree from its defaults, a preset, a file and the command line.

Precedence, weakest first::

    dataclass defaults  <  preset (hone/config/presets)  <  file (--config-path, --config-name)  <  command line

Hydra composes the layers with the dataclasses as schema, so its grammar (``key=value``, ``+``, ``++``, ``~``, quoting),
its defaults lists and its interpolations work as documented there. Each layer is also read alone, without the schema:
that tells where a value was written, and lets all mistakes be named at once instead of the first that Hydra meets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.config.check import Provenance, complaints, wrong_type
from hone.config.keys import TYPE_WORDS, KeyDoc, blocks, documentation
from hone.config.suggest import unknown_key
from hone.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

PRESETS = Path(__file__).parent / "presets"
_COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Sources:
    """Where the values of a tree come from.

    Args:
        schema: the root dataclass.
        kind: the folder of its presets ("rl", "sft").
        preset: name of a preset of that kind.
        directory: folder of the user's file, made absolute; None without a file.
        name: the file's name with or without ``.yaml``.
        overrides: command-line overrides in Hydra's grammar.
    """

    schema: type
    kind: str
    preset: str | None
    directory: Path | None
    name: str | None
    overrides: list[str]

    @functools.cached_property
    def typed(self) -> DictConfig:
        """A typed tree to try values on; what it holds means nothing."""
        from omegaconf import OmegaConf

        return OmegaConf.structured(self.schema)

    @property
    def file_label(self) -> str:
        """The user's file as shown in messages."""
        return f"file {Path(str(self.directory)) / str(self.name).removesuffix('.yaml')}.yaml"


def preset_names(kind: str) -> list[str]:
    """Return the names of the presets for the trees of ``kind``."""
    return sorted(path.stem for path in (PRESETS / kind).glob("*.yaml"))


def compose(sources: Sources) -> tuple[DictConfig, Provenance, list[ConfigError]]:
    """Compose the layers.

    Returns:
        The composed tree (interpolations not yet resolved), where each value that was written comes from, and the
        problems found. With problems the tree must not be used.

    Raises:
        ConfigError: a preset or file is missing or cannot be read, so that nothing can be composed.
    """
    _check_sources(sources)
    problems: list[ConfigError] = []
    provenance: Provenance = {}
    written: dict[str, Any] = {}
    layers: list[str] = []
    with _hydra(sources):
        overrides, malformed = _parse(sources.overrides)
        problems += malformed
        groups = [override for override in overrides if _is_group(override)]
        group_lines = [str(override.input_line) for override in groups]
        if sources.preset:
            layers.append(f"presets/{sources.kind}/{sources.preset}@_global_")
            _inspect_layer(sources, layers[-1], f"preset {sources.preset}", [], provenance, written, problems)
        if sources.name:
            layers.append(f"{sources.name.removesuffix('.yaml')}@_global_")
            _inspect_layer(sources, layers[-1], sources.file_label, group_lines, provenance, written, problems)
        settings = [override for override in overrides if override not in groups]
        lines = [*group_lines, *_inspect_overrides(sources, settings, provenance, written, problems)]
        if problems:
            keys = {key.path: key for key in documentation(sources.schema)}
            problems += [p for path, value in written.items() for p in complaints(keys[path], value, provenance[path])]
            return _empty(), provenance, problems
        return _compose(["hone_schema", *layers], lines, "the configuration", _OVERRIDE_FIX), provenance, problems


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
            f"no file {file}" if sources.directory.is_dir() else f"no directory {sources.directory}",
            where="--config-path, --config-name",
            fix=did_you_mean(str(sources.name), here) if here else "give the directory and the name of a YAML file",
        )


@contextmanager
def _hydra(sources: Sources) -> Iterator[None]:
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="hone_schema", node=sources.schema)
    directory = sources.directory or PRESETS
    with initialize_config_dir(config_dir=str(directory.absolute()), job_name="hone", version_base="1.3"):
        yield


_OVERRIDE_FIX = "key=value sets a key, ++key=value also adds one to a mapping, ~key removes one from a mapping"
_FILE_FIX = "a config file is a mapping of blocks in UTF-8; its defaults list, if any, names files that exist"


def _compose(defaults: Sequence[str], lines: list[str], what: str, fix: str = _FILE_FIX) -> DictConfig:
    """Let Hydra compose ``defaults`` and ``lines``; its errors become one ConfigError about ``what``."""
    from hydra import compose as hydra_compose
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    node = OmegaConf.create({"hydra": {"searchpath": [f"file://{PRESETS.parent}"]}, "defaults": [*defaults, "_self_"]})
    ConfigStore.instance().store(name="hone_run", node=node)
    try:
        return hydra_compose(config_name="hone_run", overrides=lines)
    except YAMLError as error:
        raise ConfigError(f"{what} is not valid YAML: {_first_lines(error)}", fix="correct the line") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(
            f"{what} cannot be composed: {_first_lines(error)}",
            fix=fix,
        ) from error


def _first_lines(error: BaseException) -> str:
    """Return an error's message on one line, with that of its cause."""
    messages = [error, error.__cause__] if error.__cause__ else [error]
    lines = [line.strip() for message in messages for line in str(message).splitlines()]
    noise = (
        "See https",
        "provider=",
        "Config search path",
        "Available options",
        "full_key:",
        "object_type=",
        "reference_type=",
        "To append to your config use",
    )
    return "; ".join(line for line in lines if line and not line.startswith(noise))


def _empty() -> DictConfig:
    from omegaconf import OmegaConf

    return OmegaConf.create({})


# ------------------------------------------------------------------------------------------------- presets and files


def _inspect_layer(
    sources: Sources,
    layer: str,
    label: str,
    group_lines: list[str],
    provenance: Provenance,
    written: dict[str, Any],
    problems: list[ConfigError],
) -> None:
    """Note what a preset or file sets, and what is wrong with it."""
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(_compose([layer], group_lines, label))
    assert isinstance(raw, dict)
    keys = {key.path: key for key in documentation(sources.schema)}
    for path, value in _leaves(raw, sources.schema, ""):
        problem = _problem(path, value, label, sources, keys)
        if problem:
            problems.append(problem)
        else:
            _note(path, value, label, keys, provenance, written)


def _note(
    path: str,
    value: Any,
    origin: str,
    keys: dict[str, KeyDoc],
    provenance: Provenance,
    written: dict[str, Any],
) -> None:
    """Record where a key was written, and its value if it can be judged before the layers are merged."""
    leaf = _leaf_of(path, keys)
    provenance[leaf.path if leaf else path] = origin
    written.pop(path, None)
    if path in keys and not (isinstance(value, str) and "${" in value):
        written[path] = value


def _leaves(tree: dict[Any, Any], schema: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield what a layer sets: ``(path, value)`` of the schema's leaves, and of whatever it does not know."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and path in blocks(schema):
            yield from _leaves(value, schema, f"{path}.")
        else:
            yield path, value


def _problem(path: str, value: Any, origin: str, sources: Sources, keys: dict[str, KeyDoc]) -> ConfigError | None:
    """Return what is wrong with setting ``path`` to ``value``, None when nothing is."""
    if path in blocks(sources.schema):
        return _block_as_value(path, value, origin, keys)
    leaf = _leaf_of(path, keys)
    if leaf is None:
        return unknown_key(path, sources.schema, origin=origin)
    if leaf.path != path or _fits(leaf, value, sources.typed):
        return None
    return wrong_type(leaf, value, origin)


def _leaf_of(path: str, keys: dict[str, KeyDoc]) -> KeyDoc | None:
    """Return the leaf at ``path``, or the mapping (or list) that ``path`` points into."""
    while path:
        if path in keys:
            return keys[path]
        path = path.rpartition(".")[0]
        if path in keys and not (keys[path].type.startswith("a mapping") or "a list" in keys[path].type):
            return None
    return None


def _fits(key: KeyDoc, value: Any, typed: DictConfig) -> bool:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.update(typed, key.path, value, merge=True)
    except (OmegaConfBaseException, ValueError):
        return False
    return True


def _block_as_value(path: str, value: Any, origin: str, keys: dict[str, KeyDoc]) -> ConfigError:
    inside = [key.path for key in keys.values() if key.path.startswith(f"{path}.")]
    return ConfigError(
        f"{path} is a block of keys and cannot be set to {value!r} ({origin})",
        fix=f"set a key of it: {', '.join(inside[:6])}{', ...' if len(inside) > 6 else ''}",
        code="R11",
    )


# -------------------------------------------------------------------------------------------------------- command line


def _parse(lines: list[str]) -> tuple[list[Override], list[ConfigError]]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    parser = OverridesParser.create()
    overrides, problems = [], []
    for line in lines:
        try:
            (override,) = parser.parse_overrides([line])
        except OverrideParseException as error:
            problems.append(_malformed(line, _first_lines(error)))
            continue
        if not override.key_or_group:
            problems.append(_malformed(line, "it has no key"))
        elif override.is_sweep_override():
            problems.append(
                ConfigError(
                    "gives several values to one key",
                    why="one run takes one value; a comma outside brackets and quotes means a sweep",
                    fix=f"for a list put brackets around it: '{override.get_key_element()}=[...]'",
                    where=line,
                )
            )
        else:
            overrides.append(override)
    return overrides, problems


def _malformed(line: str, reason: str) -> ConfigError:
    if "=" not in line and not line.startswith("~"):
        return ConfigError(f"'{line}' is not an override", fix="write key=value", where=_COMMAND_LINE)
    key, _, value = line.partition("=")
    open_bracket = any(value.count(left) != value.count(right) for left, right in ("[]", "{}", "()"))
    return ConfigError(
        f"'{line}' cannot be read as key=value: {reason}",
        why="spaces, commas, colons, brackets and braces in a value have a meaning of their own",
        fix="close every bracket"
        if open_bracket
        else f"quote the value for Hydra and for the shell: '{key}=\"{value}\"'",
        where=_COMMAND_LINE,
    )


def _is_group(override: Override) -> bool:
    """Tell whether an override chooses a file of a config group in the user's directory (``model=small``)."""
    from hydra.core.global_hydra import GlobalHydra

    return "." not in override.key_or_group and bool(
        GlobalHydra.instance().config_loader().get_group_options(override.key_or_group)
    )


def _inspect_overrides(
    sources: Sources,
    overrides: list[Override],
    provenance: Provenance,
    written: dict[str, Any],
    problems: list[ConfigError],
) -> list[str]:
    """Check the settings and return them as Hydra shall apply them."""
    from hydra.core.override_parser.types import OverrideType

    keys = {key.path: key for key in documentation(sources.schema)}
    lines = []
    for override in overrides:
        path, line = override.key_or_group, str(override.input_line)
        leaf = _leaf_of(path, keys)
        inside_mapping = leaf is not None and leaf.path != path
        if override.is_delete():
            problem = None if inside_mapping else _undeletable(path, leaf, sources)
        else:
            problem = _problem(path, _value(override), _COMMAND_LINE, sources, keys)
        if problem:
            problems.append(problem)
            continue
        # The keys of a mapping are free: a plain `=` may add one, where Hydra alone would ask for a `+`.
        free = inside_mapping or (leaf is not None and leaf.type == TYPE_WORDS[dict])
        lines.append(f"++{line}" if free and override.type is OverrideType.CHANGE else line)
        _note(path, None if override.is_delete() else _value(override), _COMMAND_LINE, keys, provenance, written)
    return lines


def _value(override: Override) -> Any:
    from hydra.core.override_parser.types import QuotedString

    value = override.value()
    return value.text if isinstance(value, QuotedString) else value


def _undeletable(path: str, leaf: KeyDoc | None, sources: Sources) -> ConfigError:
    if leaf is None:
        return unknown_key(path, sources.schema, origin=_COMMAND_LINE)
    return ConfigError(
        f"{path} is part of the tree and cannot be removed",
        fix=f"{path}=null" if "null" in leaf.type else f"leave it at its default, or set {path}=...",
        where=f"~{path}",
    )
