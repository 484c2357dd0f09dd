"""Inspection of each configuration layer on its own: the keys that it sets, and mistakes in them."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hone.config.check import Provenance, complaints, place, raise_together, wrong_type
from hone.config.keys import TYPE_WORDS, KeyDoc, blocks, documentation, leaf_of, unknown_key
from hone.config.migration.reading import Outcome, outcome_text, read_setting, unsupported
from hone.config.overrides import COMMAND_LINE, override_value
from hone.errors import ConfigError

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
        """Return the error for a key that the tree does not have; it may be a key of verl."""
        reading = read_setting(path, value, {}, self.schema)
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
