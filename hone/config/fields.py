"""Field helpers for the config tree: a default with its allowed values.

:mod:`hone.config.keys` (checks of values, and documentation) reads the metadata that they store:

- ``choices``: the strings allowed, or allowed in a list;
- ``low``, ``high``, ``above``: bounds of a number, or of every number in a list;
- ``words``: strings that are allowed besides numbers;
- ``length``: length of a list of numbers;
- ``names``: kind of a registered name ("policy loss"), so that a number is an error;
- ``instead``: the key to suggest when a user sets this one to a number;
- ``texts``: kind of the strings when the value is a string or a list of strings;
- ``hub``: "model" or "dataset" for a local path that may also be a name of the hub.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def choice(default: str | None, *options: str) -> Any:
    """Return a string field whose value is one of ``options`` (or null, when the default is null)."""
    return dataclasses.field(default=default, metadata={"choices": options})


def choices(*options: str) -> Any:
    """Return a field for a list of strings, each one of ``options``; empty by default."""
    return dataclasses.field(default_factory=list, metadata={"choices": options})


def number(
    default: float | int | None, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """Return a number field with ``low <= value <= high`` and ``value > above`` for each given bound; null is allowed."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "above": above})


def numbers(default: Sequence[float], *, low: float | None = None, high: float | None = None) -> Any:
    """Return a field for a list with the length of ``default``, each number with ``low <= value <= high``."""
    metadata = {"length": len(default), "low": low, "high": high}
    return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)


AFTER_EACH_EPOCH = "after_each_epoch"


def frequency(default: int) -> Any:
    """Return a field for a period in steps; -1 means only at the end, 0 never, ``after_each_epoch`` after each epoch."""
    return dataclasses.field(default=default, metadata={"low": -1, "words": (AFTER_EACH_EPOCH,)})


def named(default: str | None, kind: str, *, instead: str = "") -> Any:
    """Return a field for a registered name of a ``kind``; ``instead`` is the key to suggest for a number."""
    return dataclasses.field(default=default, metadata={"names": kind, "instead": instead})


def texts(default: str | None, kind: str) -> Any:
    """Return a field for a string or a list of strings of a ``kind`` ("path"); null is allowed."""
    return dataclasses.field(default=default, metadata={"texts": kind})


def model_path() -> Any:
    """Return a field for a local model, tokenizer or adapter directory, or its name on the hub; null by default."""
    return dataclasses.field(default=None, metadata={"hub": "model"})


def dataset_paths() -> Any:
    """Return a field for one or several dataset files, or names of datasets on the hub; null by default."""
    return dataclasses.field(default=None, metadata={"texts": "path", "hub": "dataset"})


def block(cls: type, **changes: Any) -> Any:
    """Return a field for a nested block, with changed defaults for some of its keys."""
    return dataclasses.field(default_factory=lambda: cls(**changes))
