"""Field helpers for the config tree: a default together with what is allowed."""

from __future__ import annotations

import dataclasses
from typing import Any


def choice(default: str | None, *options: str) -> Any:
    """A string key whose value is one of ``options`` (or null, when the default is null)."""
    return dataclasses.field(default=default, metadata={"choices": options})


def number(default: float | int | None, *, low: float | None = None, high: float | None = None, above: float | None = None) -> Any:
    """A number with ``low <= value <= high`` and ``value > above``, where each bound is given; null passes."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "above": above})


def block(cls: type, **changes: Any) -> Any:
    """A nested block, with other defaults for some of its keys."""
    return dataclasses.field(default_factory=lambda: cls(**changes))
