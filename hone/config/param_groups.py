"""Entries of ``optim.param_groups``: parameters with settings of their own, chosen by their names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.errors import ConfigError, did_you_mean

KEY = "optim.param_groups"
_KEYS = ("params", "lr_mult", "weight_decay")


@dataclass(frozen=True)
class ParamGroup:
    """One entry."""

    params: re.Pattern[str]  # regular expression, found anywhere in a parameter's name
    lr_mult: float = 1.0  # factor of the learning rate
    weight_decay: float | None = None  # of all its parameters, norms and biases included; None for the optimizer's


def read_param_groups(entries: Sequence[Mapping[str, Any]], key: str = KEY) -> list[ParamGroup]:
    """Return the entries of ``key``.

    Raises ConfigError: an entry has an unknown setting, lacks its expression, or has a value out of range.
    """
    return [_read(entry, f"{key}[{number}]") for number, entry in enumerate(entries)]


def assign_groups(names: Iterable[str], groups: Sequence[ParamGroup], key: str = KEY) -> dict[str, ParamGroup]:
    """Return the entry of each parameter that has one: the first whose expression is found in its name. Raises
    ConfigError: an entry applies to no parameter.
    """
    names = list(names)
    matches = {name: [group for group in groups if group.params.search(name)] for name in names}
    assigned = {name: matching[0] for name, matching in matches.items() if matching}
    for number, group in enumerate(groups):
        if any(other is group for other in assigned.values()):
            continue
        taken = sum(group in matching for matching in matches.values())
        earlier = f": earlier entries have all {taken} that it matches" if taken else ""
        example = f"change the expression; names are like {names[len(names) // 2]}" if names else "remove the entry"
        raise ConfigError(
            f"'{group.params.pattern}' applies to none of {len(names)} trained parameters{earlier}",
            why="the entry would have no effect",
            where=f"{key}[{number}].params",
            fix="put it before the others" if taken else example,
        )
    return assigned


def _read(entry: Mapping[str, Any], where: str) -> ParamGroup:
    unknown = [name for name in entry if name not in _KEYS]
    if unknown:
        raise ConfigError(
            f"'{unknown[0]}' is not a setting of a parameter group",
            fix=f"{did_you_mean(str(unknown[0]), _KEYS)} The settings are {', '.join(_KEYS)}.",
            where=where,
        )
    params = entry.get("params")
    if not isinstance(params, str) or not params:
        raise ConfigError(
            f"params is {params!r}, not a regular expression",
            fix="for example {params: embed_tokens, lr_mult: 0.1}",
            where=where,
        )
    try:
        pattern = re.compile(params)
    except re.error as error:
        raise ConfigError(f"'{params}' is not a regular expression: {error}", where=f"{where}.params") from error
    values: dict[str, float] = {}
    for name in ("lr_mult", "weight_decay"):
        value = entry.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"{name} is {value!r}, not a number >= 0", where=f"{where}.{name}")
        values[name] = float(value)
    return ParamGroup(pattern, **values)
