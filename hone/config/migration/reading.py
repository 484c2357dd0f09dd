"""Reading one setting of verl: what it sets here, and what is to be said about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hone.config.keys import TYPE_WORDS, KeyDoc, blocks, documentation
from hone.config.migration.entries import Changed, Foreign, Refused, Renamed, Settled, Unsupported
from hone.config.migration.table import TABLES, VALUES
from hone.config.tree import RLConfig


class Outcome(StrEnum):
    """What became of a setting."""

    KEPT = "kept"
    RENAMED = "renamed"
    CHANGED = "changed"
    SETTLED = "always so here"
    WITHOUT_EFFECT = "without effect beside the others"
    FOREIGN = "no meaning here"
    UNSUPPORTED = "not supported yet"
    UNKNOWN = "not understood"


@dataclass(frozen=True)
class Reading:
    """One setting, read.

    Args:
        key: as written.
        value: as written.
        outcome: what became of it.
        sets: keys of Hone and their values; for what is not supported, the nearest that is.
        says: the difference, in words.
        instead: what to do about it.
    """

    key: str
    value: Any
    outcome: Outcome
    sets: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    instead: str = ""


def read_setting(key: str, value: Any, others: Mapping[str, Any], schema: type = RLConfig) -> Reading:
    """Read ``key=value`` of a configuration whose other settings are ``others``.

    A key of the tree is taken as it is, unless :data:`VALUES` knows another word for its value; any other is looked up in
    :data:`TABLES`.
    """
    own = own_key(key, schema)
    if own is not None and own.path == key:
        return _own(key, value, others, schema)
    entry = TABLES[schema].find(key) if schema in TABLES else None
    if entry is None:
        known = own is not None or key in blocks(schema)
        return Reading(key, value, Outcome.KEPT, {key: value}) if known else Reading(key, value, Outcome.UNKNOWN)
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
                return Reading(key, value, Outcome.SETTLED, says=f"not supported yet, and not asked for: {what}")
            return Reading(key, value, Outcome.UNSUPPORTED, says=f"not supported yet: {what}", instead=instead)
        case Foreign(reason):
            return Reading(key, value, Outcome.FOREIGN, says=reason)


def own_key(key: str, schema: type) -> KeyDoc | None:
    """Return the key of the tree that ``key`` is, or points into when that is a mapping."""
    keys = {leaf.path: leaf for leaf in documentation(schema)}
    if key in keys:
        return keys[key]
    while key := key.rpartition(".")[0]:
        if key in keys:
            return keys[key] if keys[key].type == TYPE_WORDS[dict] else None
    return None


def _own(key: str, value: Any, others: Mapping[str, Any], schema: type) -> Reading:
    words = VALUES.get(schema, {}).get(key)
    if words is None:
        return Reading(key, value, Outcome.KEPT, {key: value})
    reading = _changed(key, value, words.sets, words.says, others)
    same = reading.outcome is Outcome.CHANGED and reading.sets == {key: value}
    return Reading(key, value, Outcome.KEPT, {key: value}) if same else reading


def _renamed(key: str, value: Any, to: str, says: str, others: Mapping[str, Any], schema: type) -> Reading:
    """Read the value under the key's name here, which may have other words for it."""
    there = _own(to, value, others, schema)
    outcome = Outcome.RENAMED if there.outcome is Outcome.KEPT else there.outcome
    words = "; ".join(part for part in (says, there.says) if part)
    return Reading(key, value, outcome, there.sets, words, there.instead)


def _changed(key: str, value: Any, sets: Any, says: str, others: Mapping[str, Any]) -> Reading:
    try:
        found = sets(value, others)
    except Refused as refused:
        what = f"not supported yet: {refused.what}"
        return Reading(key, value, Outcome.UNSUPPORTED, refused.stand_in, what, refused.instead)
    return Reading(key, value, Outcome.CHANGED if found else Outcome.SETTLED, found, says)
