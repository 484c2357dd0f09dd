"""The tables of other trainers' keys: those of verl by command, from ``verl.yaml``, and of LLaMA-Factory, from ``llamafactory.yaml``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hone.config.migration.conversions import BY_NAME, Words
from hone.config.migration.entries import OFF, Changed, Entry, Foreign, Renamed, Settled, Table, Unsupported
from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig
from hone.text import read_yaml


def _read(name: str) -> dict[str, Any]:
    """Read a file of tables, with each ``$word`` replaced by what ``names`` says it stands for."""
    data = read_yaml(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return _named(data, data["names"])


def _named(value: Any, names: Mapping[str, str]) -> Any:
    match value:
        case str():
            return re.sub(r"\$(\w+)", lambda m: names.get(m[1], m[0]), value)
        case list():
            return [_named(item, names) for item in value]
        case dict():
            return {_named(key, names): _named(item, names) for key, item in value.items()}
    return value


def _entry(kind: str, row: Mapping[str, Any]) -> Entry:
    match kind:
        case "settled":
            return Settled(row["says"], tuple(row["only"]) if "only" in row else None, row.get("instead", ""))
        case "unsupported":
            return Unsupported(row["what"], row["instead"], tuple(row["off"]) if "off" in row else OFF)
        case "foreign":
            return Foreign(row["reason"])
    to = tuple(row["to"]) if isinstance(row.get("to"), list) else (row["to"],) if "to" in row else ()
    return Changed(row["says"], _conversion(row, to[0] if to else ""), to)


def _conversion(row: Mapping[str, Any], path: str) -> Callable[[Any, Mapping[str, Any]], dict[str, Any]]:
    if "by" in row:
        return BY_NAME[row["by"]]
    rules = {name: value for name, value in row.items() if name not in ("keys", "says", "to")}
    return Words(path, **rules)


def _table(tables: Mapping[str, Any]) -> Table:
    entries: dict[str, Entry] = {key: Renamed(to) for key, to in tables["renamed"].items()}
    for kind in ("settled", "unsupported", "foreign", "changed"):
        for row in tables[kind]:
            keys = row["keys"] if isinstance(row["keys"], list) else [row["keys"]]
            entries.update((key, _entry(kind, row)) for key in keys)
    return Table(entries)


def _values(tables: Mapping[str, Any]) -> dict[str, Changed]:
    return {key: Changed(row["says"], _conversion(row, key)) for key, row in tables["values"].items()}


_VERL = _read("verl.yaml")

TABLES: dict[type, Table] = {RLConfig: _table(_VERL["train"]), SFTConfig: _table(_VERL["sft"])}
"""What becomes of keys of verl that the tree does not have."""

VALUES: dict[type, Mapping[str, Changed]] = {RLConfig: _values(_VERL["train"]), SFTConfig: _values(_VERL["sft"])}
"""What becomes of values that a key of the tree takes only in verl."""

DEFAULTS: dict[str, dict[str, Any]] = _VERL["defaults"]
"""Where verl's defaults differ from Hone's, by its programs: ``train``, ``sft`` and the older ``fsdp_sft``."""

LLAMA_FACTORY: Table = _table(_read("llamafactory.yaml")["sft"])
"""What becomes of the keys of LLaMA-Factory's supervised fine-tuning."""
