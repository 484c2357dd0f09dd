"""Override lines of verl on Hone's command line: supported ones are translated, others are refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hone.config.migration.reading import Outcome, Reading, key_in_tree, read_setting
from hone.config.migration.table import TABLES
from hone.config.overrides import COMMAND_LINE, hydra_value, override_value, parse_overrides
from hone.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

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
            key_doc = key_in_tree(key, schema)
            added = override.type is OverrideType.ADD and key_doc is not None and key_doc.path == key
            kept += parse_overrides([line.removeprefix("+")])[0] if added else [override]
        elif reading.outcome is Outcome.UNSUPPORTED:
            problems.append(unsupported(reading, f"{line} ({COMMAND_LINE})"))
        else:
            kept += parse_overrides([f"{path}={hydra_value(value)}" for path, value in reading.sets.items()])[0]
            log.info("%s: %s", line, outcome_text(reading))
    return kept, problems


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
