"""Translation of one setting of verl: the keys that it sets in Hone, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hone.config.keys import TYPE_WORDS, KeyDoc, blocks, documentation
from hone.config.migration.entries import Changed, Entry, Foreign, Refused, Renamed, Settled, Unsupported
from hone.config.migration.table import TABLES, VALUES
from hone.config.tree import RLConfig


class Outcome(StrEnum):
    """Outcome of the translation of a setting."""

    KEPT = "kept"
    RENAMED = "renamed"
    CHANGED = "changed"
    SETTLED = "always so here"
    WITHOUT_EFFECT = "without effect with these settings"
    FOREIGN = "no meaning here"
    UNSUPPORTED = "not supported yet"
    UNKNOWN = "not understood"


@dataclass(frozen=True)
class Reading:
    """Translation of one setting.

    Args:
        key: key as written.
        value: value as written.
        outcome: outcome of the translation.
        sets: keys of Hone and their values; for an unsupported setting the nearest supported ones.
        says: description of the difference.
        instead: alternative for an unsupported setting.
    """

    key: str
    value: Any
    outcome: Outcome
    sets: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    instead: str = ""


def read_setting(key: str, value: Any, others: Mapping[str, Any], schema: type = RLConfig) -> Reading:
    """Translate ``key=value`` of a configuration whose other settings are ``others``.

    A key of the tree is kept, unless :data:`VALUES` has another spelling of its value; other keys are looked up in
    :data:`TABLES`.
    """
    key_doc = key_in_tree(key, schema)
    if key_doc is not None and key_doc.path == key:
        return _read_known_key(key, value, others, schema)
    entry = TABLES[schema].find(key) if schema in TABLES else None
    if entry is None:
        known = key_doc is not None or key in blocks(schema)
        return Reading(key, value, Outcome.KEPT, {key: value}) if known else Reading(key, value, Outcome.UNKNOWN)
    return read_by(entry, key, value, others, schema)


def read_by(entry: Entry, key: str, value: Any, others: Mapping[str, Any], schema: type) -> Reading:
    """Translate ``key=value`` by the entry of a table."""
    match entry:
        case Renamed(to, says):
            return _renamed(key, value, to, says, others, schema)
        case Changed(says, sets):
            return _changed(key, value, sets, says, others)
        case Settled(says, only, instead):
            if only is None or value in only:
                return Reading(key, value, Outcome.SETTLED, says=says)
            return Reading(key, value, Outcome.UNSUPPORTED, says=f"not supported yet: here {says}", instead=instead)
        case Unsupported(what, instead, off):
            if value in off:
                return Reading(key, value, Outcome.SETTLED, says=f"not supported yet, and not requested: {what}")
            return Reading(key, value, Outcome.UNSUPPORTED, says=f"not supported yet: {what}", instead=instead)
        case Foreign(reason):
            return Reading(key, value, Outcome.FOREIGN, says=reason)


def key_in_tree(key: str, schema: type) -> KeyDoc | None:
    """Return the key of the tree at a path, or the mapping that the path points into; None otherwise."""
    keys = {leaf.path: leaf for leaf in documentation(schema)}
    if key in keys:
        return keys[key]
    while key := key.rpartition(".")[0]:
        if key in keys:
            return keys[key] if keys[key].type == TYPE_WORDS[dict] else None
    return None


def _read_known_key(key: str, value: Any, others: Mapping[str, Any], schema: type) -> Reading:
    words = VALUES.get(schema, {}).get(key)
    if words is None:
        return Reading(key, value, Outcome.KEPT, {key: value})
    reading = _changed(key, value, words.sets, words.says, others)
    same = reading.outcome is Outcome.CHANGED and reading.sets == {key: value}
    return Reading(key, value, Outcome.KEPT, {key: value}) if same else reading


def _renamed(key: str, value: Any, to: str, says: str, others: Mapping[str, Any], schema: type) -> Reading:
    """Translate the value under the key's name in Hone, which may spell values differently."""
    there = _read_known_key(to, value, others, schema)
    outcome = Outcome.RENAMED if there.outcome is Outcome.KEPT else there.outcome
    words = "; ".join(part for part in (says, there.says) if part)
    return Reading(key, value, outcome, there.sets, words, there.instead)


def _changed(key: str, value: Any, sets: Any, says: str, others: Mapping[str, Any]) -> Reading:
    try:
        settings = sets(value, others)
    except Refused as refused:
        what = f"not supported yet: {refused.what}"
        return Reading(key, value, Outcome.UNSUPPORTED, refused.stand_in, what, refused.instead)
    return Reading(key, value, Outcome.CHANGED if settings else Outcome.SETTLED, settings, says)
