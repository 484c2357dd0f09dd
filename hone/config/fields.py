"""Field helpers for the config tree: a default together with what is allowed.

What they store in a field's metadata is read by :mod:`hone.config.check` (values) and :mod:`hone.config.keys`
(documentation):

- ``choices``: the strings allowed;
- ``low``, ``high``, ``above``: bounds of a number, or of every number in a list;
- ``length``: how many numbers a list holds;
- ``names``: the value names something that is registered ("policy loss"), so a number cannot be meant;
- ``instead``: the key that takes a number which users often give to this one;
- ``texts``: the value is a string or a list of strings, and what they stand for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def choice(default: str | None, *options: str) -> Any:
    """A string key whose value is one of ``options`` (or null, when the default is null)."""
    return dataclasses.field(default=default, metadata={"choices": options})


def number(
    default: float | int | None, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A number with ``low <= value <= high`` and ``value > above``, where each bound is given; null passes."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "above": above})


def numbers(default: Sequence[float], *, low: float | None = None, high: float | None = None) -> Any:
    """A list of as many numbers as ``default`` has, each with ``low <= value <= high``."""
    metadata = {"length": len(default), "low": low, "high": high}
    return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)


def named(default: str | None, of: str, *, instead: str = "") -> Any:
    """The name of a registered ``of``; ``instead`` is the key that takes a number meant for this method."""
    return dataclasses.field(default=default, metadata={"names": of, "instead": instead})


def texts(default: str | None, of: str) -> Any:
    """A string or a list of strings, each ``of`` a kind ("path"); null passes."""
    return dataclasses.field(default=default, metadata={"texts": of})


def block(cls: type, **changes: Any) -> Any:
    """A nested block, with other defaults for some of its keys."""
    return dataclasses.field(default_factory=lambda: cls(**changes))
