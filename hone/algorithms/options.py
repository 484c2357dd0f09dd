"""Options of methods: the keyword-only parameters of their functions, named as configuration keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from hone.errors import ConfigError, did_you_mean


def options_of(*functions: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only parameters of functions, with their defaults."""
    parameters = (p for function in functions for p in inspect.signature(function).parameters.values())
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def check_options(method: str, options: Iterable[str], known: Collection[str], *, where: str) -> None:
    """Raise ConfigError if an option is not among those of a method."""
    for option in options:
        if option not in known:
            fix = did_you_mean(option, known) if known else "it takes no options"
            raise ConfigError(f"{method} has no option '{option}'", fix=fix, where=where)
