"""Looking at each layer alone: what it sets, and what is wrong with that."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hone.config.check import Provenance, complaints, place, wrong_type
from hone.config.keys import TYPE_WORDS, KeyDoc, blocks, documentation
from hone.config.migration.command_line import told, unsupported
from hone.config.migration.reading import Outcome, own_key, read_setting
from hone.config.overrides import COMMAND_LINE, override_value
from hone.config.problems import raise_together
from hone.config.suggest import unknown_key
from hone.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig


class Inspection:
    """Gathers what the layers set, in their order of precedence, and every mistake in them.

    Args:
        schema: root dataclass of the tree.

    Attributes:
        provenance: where each key was last written.
        problems: what is wrong so far.
    """

    def __init__(self, schema: type) -> None:
        self.schema = schema
        self.provenance: Provenance = {}
        self.problems: list[ConfigError] = []
        self._keys = {key.path: key for key in documentation(schema)}
        self._written: dict[str, Any] = {}
        self._trial = _trial(schema)

    def layer(self, tree: Any, origin: str) -> None:
        """Look at a preset or file, given as nested dicts."""
        for path, value in _leaves(tree, self.schema, ""):
            self._set(path, value, origin)

    def command_line(self, overrides: list[Override]) -> list[Override]:
        """Look at overrides and return those without mistakes, as they shall be applied."""
        return [fitting for override in overrides if (fitting := self._override(override)) is not None]

    def finish(self) -> None:
        """Raise all problems, together with values that would be found out of bounds once the layers are merged."""
        if self.problems:
            for path, value in self._written.items():
                self.problems += complaints(self._keys[path], value, self.provenance[path])
        raise_together(self.problems)

    def _override(self, override: Override) -> Override | None:
        from hydra.core.override_parser.types import OverrideType

        path, value = override.key_or_group, override_value(override)
        leaf = self._leaf_of(path)
        inside_mapping = leaf is not None and leaf.path != path
        if override.is_delete() and not inside_mapping:
            self.problems.append(self._undeletable(path, leaf))
            return None
        before = len(self.problems)
        for key, item in self._spread(path, value):
            self._set(key, item, COMMAND_LINE)
        if len(self.problems) > before:
            return None
        # The keys of a mapping are free: a plain `=` may add one, where Hydra alone would ask for a `+`.
        free = inside_mapping or (leaf is not None and leaf.type == TYPE_WORDS[dict])
        adds = free and override.type is OverrideType.CHANGE
        return dataclasses.replace(override, type=OverrideType.FORCE_ADD) if adds else override

    def _spread(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the leaves of ``path=value``, which are several when a block is given as a mapping."""
        if path in blocks(self.schema) and isinstance(value, dict):
            yield from _leaves(value, self.schema, f"{path}.")
        else:
            yield path, value

    def _set(self, path: str, value: Any, origin: str) -> None:
        """Note that ``path`` is set to ``value``, or what is wrong with that."""
        problem = self._problem(path, value, origin)
        if problem is not None:
            self.problems.append(problem)
            return
        leaf = self._leaf_of(path)
        self.provenance[leaf.path if leaf else path] = origin
        self._written.pop(path, None)
        if path in self._keys and not _is_interpolation(value):
            self._written[path] = value

    def _problem(self, path: str, value: Any, origin: str) -> ConfigError | None:
        if path in blocks(self.schema):
            return None if _is_interpolation(value) else self._block_as_value(path, value, origin)
        leaf = self._leaf_of(path)
        if leaf is None:
            return self._stranger(path, value, origin)
        return None if leaf.path != path or self._fits(leaf, value) else wrong_type(leaf, value, origin)

    def _stranger(self, path: str, value: Any, origin: str) -> ConfigError:
        """The error for a key that the tree does not have, and that may be one of verl's."""
        reading = read_setting(path, value, {}, self.schema)
        if reading.outcome is Outcome.UNKNOWN:
            return unknown_key(path, self.schema, origin=origin)
        if reading.outcome is Outcome.UNSUPPORTED:
            return unsupported(reading, place(path, value, origin))
        return ConfigError(
            f"{path} is a key of verl ({origin}); here: {told(reading)}",
            why="a configuration file of Hone holds Hone's keys",
            fix="write it so, or let `hone config import FILE` translate the whole file",
            code="R09",
        )

    def _leaf_of(self, path: str) -> KeyDoc | None:
        """Return the leaf at ``path``, or the mapping or list that ``path`` points into."""
        if path in self._keys:
            return self._keys[path]
        while path := path.rpartition(".")[0]:
            leaf = self._keys.get(path)
            if leaf is not None:
                return leaf if leaf.type == TYPE_WORDS[dict] or "a list" in leaf.type else None
        return None

    def _fits(self, key: KeyDoc, value: Any) -> bool:
        """Tell whether a value can become what the key holds."""
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
            f"{path} is part of the tree and cannot be removed",
            fix=f"{path}=null" if "null" in leaf.type else f"leave it at its default, or set {path}=...",
            where=f"~{path}",
        )


@functools.cache
def typed_tree(schema: type) -> DictConfig:
    """The tree of defaults, where every place knows its type; nobody changes it."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(schema)


@functools.cache
def _trial(schema: type) -> DictConfig:
    """A tree to try values on; what it holds means nothing."""
    return copy.deepcopy(typed_tree(schema))


def _leaves(tree: dict[Any, Any], schema: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield what a layer sets: ``(path, value)`` of the schema's leaves, and of whatever it does not know."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and (path in blocks(schema) or (_holds_foreign_keys(path, value, schema))):
            yield from _leaves(value, schema, f"{path}.")
        else:
            yield path, value


def _holds_foreign_keys(path: str, tree: dict[Any, Any], schema: type) -> bool:
    """Tell whether a mapping that the schema does not know holds keys that are known by another name."""
    if own_key(path, schema) is not None:
        return False
    return any(
        _holds_foreign_keys(f"{path}.{name}", value, schema)
        if isinstance(value, dict)
        else read_setting(f"{path}.{name}", value, {}, schema).outcome is not Outcome.UNKNOWN
        for name, value in tree.items()
    )


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value
