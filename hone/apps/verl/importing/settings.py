"""Translation of settings one by one with the table of verl's keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hone.apps.verl.importing.translation import Line, Translation
from hone.apps.verl.launch import ALWAYS_SET, UNDECIDED, Argument, Trouble, open_names, opened
from hone.config.check import yaml_value
from hone.config.keys import blocks
from hone.config.migration import TABLES, Outcome, Reading, read_setting
from hone.config.migration.entries import Foreign, Unsupported
from hone.config.migration.reading import key_in_tree
from hone.config.overrides import override_value, parse_overrides
from hone.config.suggest import nearest_keys
from hone.config.trees import TREES


def translate(lines: list[Argument], translation: Translation) -> None:
    settings = [setting for line in lines for setting in _settings(line, translation)]
    others = {key: value for _, key, value, _ in settings}
    schema = TREES[translation.command]
    for line, key, value, removed in settings:
        reading = _removal(key, schema) if removed else read_setting(key, value, others, schema)
        if reading.outcome is Outcome.UNKNOWN:
            near = [candidate.path for candidate in nearest_keys(key, schema)]
            meant = f"; did you mean {', '.join(near)}?" if near else ""
            translation.not_understood.append(Trouble(line.line, f"{opened(line.text)}: unknown key {key}{meant}"))
            continue
        translation.lines.append(Line(line.line, opened(line.text), reading))
        for path, item in reading.sets.items():
            translation.values[path] = _typed(path, item, schema)
    for name in dict.fromkeys(name for line in lines for name in open_names(line.text)):
        if name in UNDECIDED:
            translation.remarks.append(Trouble(0, f"the output of a command is unknown: write it instead of {name}"))
        elif name not in ALWAYS_SET:
            translation.remarks.append(
                Trouble(0, f"the script does not set {name}: give it as an environment variable")
            )


def _settings(line: Argument, translation: Translation) -> Iterator[tuple[Argument, str, Any, bool]]:
    """Yield ``(line, key, value, removed)`` of an override, which may set several keys of a block."""
    overrides, problems = parse_overrides([_without_tilde(opened(line.text))])
    if problems:
        translation.not_understood.append(Trouble(line.line, f"{opened(line.text)}: {problems[0].what}"))
        return
    (override,) = overrides
    path = override.key_or_group
    if override.is_delete():
        yield line, path, None, True
        return
    for key, value in _spread(path, override_value(override), TREES[translation.command]):
        yield line, key, value, False


def _without_tilde(text: str) -> str:
    """Replace ``~`` in ``key=~/data`` by the home directory, because Hydra cannot read the tilde."""
    return re.sub(r"^([^=]+=['\"]?)~/", r"\1${oc.env:HOME}/", text)


def _spread(path: str, value: Any, schema: type) -> Iterator[tuple[str, Any]]:
    whole = key_in_tree(path, schema) is not None or isinstance(TABLES[schema].find(path), Foreign | Unsupported)
    if isinstance(value, dict) and value and not whole:
        for name, item in value.items():
            yield from _spread(f"{path}.{name}", item, schema)
    else:
        yield path, value


def _removal(key: str, schema: type) -> Reading:
    known = key_in_tree(key, schema) is not None or key in blocks(schema) or TABLES[schema].find(key) is not None
    return Reading(key, None, Outcome.SETTLED if known else Outcome.UNKNOWN, says="left at its default")


def _typed(path: str, value: Any, schema: type) -> Any:
    """Return the value; a number from an environment variable gets the key's default as fallback."""
    key = key_in_tree(path, schema)
    if key is None or not isinstance(value, str) or "string" in key.type or "path" in key.type:
        return value
    return re.sub(r"\$\{oc\.env:(\w+),\1\}", lambda m: f"${{oc.env:{m[1]},{yaml_value(key.default)}}}", value)
