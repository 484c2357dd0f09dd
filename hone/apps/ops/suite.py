"""Suites of checks, read from YAML (docs/gates.md has the format)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.agents.yaml_files import read_yaml
from hone.errors import ConfigError, did_you_mean

KEY = "--suite"


@dataclass(frozen=True)
class Bounds:
    """Limits of a metric, both inclusive."""

    at_least: float | None = None  # smallest value, or None
    at_most: float | None = None  # largest value, or None


@dataclass(frozen=True)
class Check:
    """One check: a dataset that the model answers, and what its scores must be."""

    name: str
    data: tuple[str, ...]  # dataset files with held-out rows
    # the mean score must be above it with confidence: the lower end of the interval of 95 %
    at_least: float | None = None
    # the mean score may be below the released model's by at most this, with the same confidence
    no_worse_by: float | None = None
    every: bool = False  # whether every answer must have the full score 1; for canaries
    metrics: Mapping[str, Bounds] = field(default_factory=dict)  # bounds of metrics that `hone eval` prints, by name
    reward: str | None = None  # reward function as FILE:NAME; None for the scorer of the data
    n: int = 1  # answers to each prompt
    temperature: float = 0.0  # of sampling; 0 is greedy
    max_prompt_length: int = 512  # in tokens
    max_response_length: int = 512  # in tokens
    max_samples: int = -1  # rows that are used; -1 for all
    seed: int = 1  # of the draws
    episodes: tuple[str, ...] = ()  # settings of multi-turn episodes, as for `hone eval`


def read_suite(path: Path) -> list[Check]:
    """Return the checks of a suite. Paths of data and rewards start at the folder of the suite."""
    content = read_yaml(path, KEY)
    checks = content.get("checks") if isinstance(content, Mapping) else None
    if not isinstance(checks, Mapping) or not checks:
        raise ConfigError(
            f"'{path}' has no checks",
            why="a gate without checks would let every model pass",
            where=KEY,
            fix="checks: {accuracy: {data: val.parquet, at_least: 0.8}}",
        )
    return [_check(str(name), settings, path) for name, settings in checks.items()]


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("at_least", "no_worse_by", "temperature"), (float, int)),
    **dict.fromkeys(("n", "max_prompt_length", "max_response_length", "max_samples", "seed"), (int,)),
    "every": (bool,),
    "reward": (str,),
}


def _check(name: str, settings: Any, path: Path) -> Check:
    where = f"checks.{name}"
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where} of '{path}' is {settings!r}, not a block of settings", where=where)
    known = [entry.name for entry in dataclasses.fields(Check) if entry.name != "name"]
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"'{key}' is not a setting of a check", where=where, fix=did_you_mean(str(key), known))
        if key in _TYPES and (not isinstance(value, _TYPES[key]) or (isinstance(value, bool) and key != "every")):
            raise ConfigError(f"{where}.{key} is {value!r}", where=where, fix=f"{key}: <{_TYPES[key][0].__name__}>")
    data = settings.get("data")
    files = [data] if isinstance(data, str) else data
    if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
        raise ConfigError(f"{where} has no data", where=where, fix="data: val.parquet")
    bounds = {
        str(metric): _bounds(limits, f"{where}.metrics.{metric}")
        for metric, limits in dict(settings.get("metrics") or {}).items()
    }
    reward = settings.get("reward")
    check = Check(
        **{
            **dict(settings),
            "name": name,
            "data": tuple(_beside(path, file) for file in files),
            "metrics": bounds,
            "episodes": tuple(settings.get("episodes") or ()),
            "reward": None if reward is None else _beside(path, reward),
        }
    )
    if check.at_least is None and check.no_worse_by is None and not check.every and not bounds:
        raise ConfigError(
            f"{where} has no condition, so every model passes it",
            where=where,
            fix="at_least: 0.8, no_worse_by: 0.02, every: true, or metrics",
        )
    return check


def _bounds(limits: Any, where: str) -> Bounds:
    known = [entry.name for entry in dataclasses.fields(Bounds)]
    numbers = isinstance(limits, Mapping) and all(isinstance(value, float | int) for value in limits.values())
    if not isinstance(limits, Mapping) or not limits or not numbers or set(limits) - set(known):
        raise ConfigError(f"{where} is {limits!r}, not bounds", where=where, fix="{at_least: 0.9} or {at_most: 0.01}")
    return Bounds(**limits)


def _beside(path: Path, file: str) -> str:
    """Return a path of the suite as one from the current folder; names of the hub stay."""
    local = path.parent / file
    return str(local) if (path.parent / file.partition(":")[0]).exists() else file
