"""Translation of one setting of verl or TRL: the keys that it sets in Hone, and its outcome."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hone.config.keys import blocks, key_named, leaf_of
from hone.config.migration.entries import Changed, Entry, Foreign, Refused, Renamed, Settled, Unsupported
from hone.config.migration.table import TABLES, VALUES, trl_table
from hone.config.overrides import COMMAND_LINE, hydra_value, override_value, parse_overrides
from hone.config.tree import RLConfig
from hone.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


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
    """Translation of one setting."""

    key: str
    value: Any
    outcome: Outcome
    # keys of Hone and their values; for an unsupported setting the nearest supported ones
    sets: dict[str, Any] = field(default_factory=dict)
    says: str = ""  # description of the difference
    instead: str = ""  # alternative for an unsupported setting


def read_setting(key: str, value: Any, others: Mapping[str, Any], schema: type = RLConfig) -> Reading:
    """Translate ``key=value`` of a configuration whose other settings are ``others``.

    A key of the tree is kept, unless :data:`VALUES` has another spelling of its value; other keys are looked up in
    :data:`TABLES`.
    """
    key_doc = leaf_of(key, schema)
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


log = logging.getLogger("hone.config")


def translate_overrides(overrides: Sequence[Override], schema: type) -> tuple[list[Override], list[ConfigError]]:
    """Return the overrides with Hone's keys, and the errors of unsupported ones.

    Other names of keys are translated, and keys without a meaning in Hone are skipped; the log reports both. A ``+`` before a
    key of the tree, which verl needs for some keys, is accepted.
    """
    from hydra.core.override_parser.types import OverrideType

    if schema not in TABLES:
        return list(overrides), []
    values = {override.key_or_group: override_value(override) for override in overrides if not override.is_delete()}
    kept: list[Override] = []
    problems: list[ConfigError] = []
    for override in overrides:
        key = override.key_or_group
        if override.is_delete():
            kept.append(override)
            continue
        reading = read_setting(key, override_value(override), values, schema)
        line = str(override.input_line)
        if reading.outcome is Outcome.UNKNOWN:
            kept.append(override)
        elif reading.outcome is Outcome.KEPT:
            key_doc = leaf_of(key, schema)
            added = override.type is OverrideType.ADD and key_doc is not None and key_doc.path == key
            kept += parse_overrides([line.removeprefix("+")])[0] if added else [override]
        elif reading.outcome is Outcome.UNSUPPORTED:
            problems.append(unsupported(reading, f"{line} ({COMMAND_LINE})"))
        else:
            kept += parse_overrides([f"{path}={hydra_value(value)}" for path, value in reading.sets.items()])[0]
            log.info("%s: %s", line, outcome_text(reading))
    return kept, problems


def means_another(name: str, schema: type) -> bool:
    """Return whether a name of TRL is that of no key, or of a key that means something else."""
    entry = trl_table(schema).find(name)
    to = (entry.to,) if isinstance(entry, Renamed) else entry.to if isinstance(entry, Changed) else ()
    return entry is not None and name not in [key.rpartition(".")[2] for key in to]


def trl_setting(name: str, value: Any, others: Mapping[str, Any], schema: type) -> Reading | None:
    """Translate a name of TRL with its value; None if TRL has no such name, or it means the same here."""
    entry = trl_table(schema).find(name)
    if entry is None:
        return None
    reading = read_by(entry, name, value, others, schema)
    sets = {key_named(key, schema): item for key, item in reading.sets.items()}
    same = [(key.rpartition(".")[2], item) for key, item in sets.items()] == [(name, value)]
    return None if same else replace(reading, sets=sets, says=reading.says.removeprefix("not supported yet: "))


def trl_error(reading: Reading, origin: str = "") -> ConfigError:
    """Return the error for a name of TRL, with what to write instead."""
    sets = " ".join(f"{key}={hydra_value(value)}" for key, value in reading.sets.items())
    fixes = {Outcome.UNSUPPORTED: reading.instead, Outcome.FOREIGN: "leave it out", Outcome.SETTLED: "leave it out"}
    says = reading.says if reading.outcome is not Outcome.CHANGED else ""
    return ConfigError(
        f"{reading.key} is a name of TRL" + (f" ({origin})" if origin else "") + (f": {says}" if says else ""),
        why="it would have no effect" if origin else "the run would differ from what TRL does",
        fix=fixes.get(reading.outcome, sets),
        code="R09",
    )


def unsupported(reading: Reading, where: str) -> ConfigError:
    """Return the error for an unsupported setting."""
    return ConfigError(
        reading.says,
        why="the run would differ from its configuration",
        fix=reading.instead,
        where=where,
        code="E-unsupported",
    )


def outcome_text(reading: Reading) -> str:
    """Return the outcome of a setting as one line."""
    sets = ", ".join(f"{path}={hydra_value(value)}" for path, value in reading.sets.items())
    if reading.outcome in (Outcome.RENAMED, Outcome.CHANGED):
        return f"taken as {sets}" + (f" ({reading.says})" if reading.says else "")
    return f"{reading.outcome}; {reading.says}"
