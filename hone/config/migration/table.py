"""The tables of verl's keys, read from ``verl.yaml``, for each command whose run verl has too."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hone.config.migration.conversions import BY_NAME, Words
from hone.config.migration.entries import OFF, Changed, Entry, Foreign, Renamed, Settled, Table, Unsupported
from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DATA: dict[str, Any] = yaml.load(Path(__file__).with_name("verl.yaml").read_text(encoding="utf-8"), _LOADER)


def _named(value: Any) -> Any:
    """The value with each ``$word`` replaced by what ``names`` says it stands for."""
    if isinstance(value, str):
        return re.sub(r"\$(\w+)", lambda m: _DATA["names"][m[1]], value)
    return [_named(item) for item in value] if isinstance(value, list) else value


def _entry(kind: str, row: Mapping[str, Any]) -> Entry:
    text = {name: _named(value) for name, value in row.items() if isinstance(value, str)}
    match kind:
        case "settled":
            return Settled(text["says"], tuple(row["only"]) if "only" in row else None, text.get("instead", ""))
        case "unsupported":
            return Unsupported(text["what"], text["instead"], tuple(row["off"]) if "off" in row else OFF)
        case "foreign":
            return Foreign(text["reason"])
    to = tuple(row["to"]) if isinstance(row.get("to"), list) else (row["to"],) if "to" in row else ()
    return Changed(text["says"], _conversion(row, to[0] if to else ""), to)


def _conversion(row: Mapping[str, Any], path: str) -> Callable[[Any, Mapping[str, Any]], dict[str, Any]]:
    if "by" in row:
        return BY_NAME[row["by"]]
    rules = {name: value for name, value in row.items() if name not in ("keys", "says", "to")}
    return Words(path, **rules)


def _table(name: str) -> Table:
    entries: dict[str, Entry] = {_named(key): Renamed(to) for key, to in _DATA[name]["renamed"].items()}
    for kind in ("settled", "unsupported", "foreign", "changed"):
        for row in _DATA[name][kind]:
            keys = row["keys"] if isinstance(row["keys"], list) else [row["keys"]]
            entries.update((_named(key), _entry(kind, row)) for key in keys)
    return Table(entries)


def _values(name: str) -> dict[str, Changed]:
    return {key: Changed(row["says"], _conversion(row, key)) for key, row in _DATA[name]["values"].items()}


TABLES: dict[type, Table] = {RLConfig: _table("train"), SFTConfig: _table("sft")}
"""What becomes of keys that the tree does not have."""

VALUES: dict[type, Mapping[str, Changed]] = {RLConfig: _values("train"), SFTConfig: _values("sft")}
"""What becomes of values that a key of the tree takes only in verl."""

DEFAULTS: dict[str, dict[str, Any]] = _DATA["defaults"]
"""Where verl's defaults differ from Hone's, by its programs: ``train``, ``sft`` and the older ``fsdp_sft``."""
