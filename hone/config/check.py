"""Checks of single values against the types and bounds of the tree; preflight checks combinations of keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hone.config.keys import KeyDoc, article, documentation, leaf_values
from hone.errors import ConfigError, HoneError, did_you_mean


class ConfigProblems(ConfigError):
    """All mistakes in a configuration; ``problems`` holds the single errors."""

    def __init__(self, problems: Sequence[HoneError]) -> None:
        self.problems = list(problems)
        super().__init__(f"{len(self.problems)} problems", code=self.problems[0].code)

    def render(self) -> str:
        return "\n".join([*(problem.render() for problem in self.problems), f"({len(self.problems)} problems)"])


def raise_together(problems: Sequence[HoneError]) -> None:
    """Raise a single problem, or :class:`ConfigProblems` with several; do nothing without problems."""
    problems = list({problem.render(): problem for problem in problems}.values())  # two rules may meet the same mistake
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigProblems(problems)


Provenance = dict[str, str]
"""Origin of each value: dotted path to "preset grpo", "file DIR/NAME.yaml" or "command line"."""


def check_values(config: Any, provenance: Provenance) -> list[ConfigError]:
    """Return one error for each value that the metadata of its field forbids."""
    keys = {key.path: key for key in documentation(type(config))}
    return [
        problem
        for path, value in leaf_values(config)
        for problem in complaints(keys[path], value, provenance.get(path, ""))
    ]


def complaints(key: KeyDoc, value: Any, origin: str) -> Iterator[ConfigError]:
    """Yield the errors of a value according to the metadata of its key."""
    if value is None:
        return
    metadata, where = key.metadata, functools.partial(place, key.path, value, origin)  # most values have no error
    if "texts" in metadata and not _is_texts(value):
        yield wrong_type(key, value, origin)
    elif "names" in metadata and _is_number(value):
        yield _number_for_name(key, value, where)
    elif "choices" in metadata:
        for item in value if isinstance(value, list) else [value]:
            if item not in metadata["choices"]:
                yield ConfigError(
                    f"'{item}' is not one of {key.allowed}",
                    fix=did_you_mean(str(item), metadata["choices"]),
                    where=where(),
                    code="R11",
                )
    elif isinstance(value, str) and "words" in metadata and value not in metadata["words"]:
        yield ConfigError(
            f"'{value}' is neither a number nor {' or '.join(metadata['words'])}",
            fix=did_you_mean(value, metadata["words"]),
            where=where(),
            code="R11",
        )
    elif "length" in metadata and len(value) != metadata["length"]:
        yield ConfigError(
            f"expects {metadata['length']} numbers, got {len(value)}",
            fix=f"for example {key.path}={yaml_value(key.default)}",
            where=where(),
            code="R11",
        )
    else:
        yield from _bound_complaints(key, value, where)


def place(path: str, value: Any, origin: str) -> str:
    """Return ``path=value (origin)``, the place of an error."""
    return f"{path}={yaml_value(value)}" + (f" ({origin})" if origin else "")


def wrong_type(key: KeyDoc, value: Any, origin: str) -> ConfigError:
    """Return the error for a value of the wrong type; ``origin`` is where it was written."""
    expected = key.type + (f" ({key.allowed})" if key.allowed else "")
    example = "null" if key.default is None else key.default
    return ConfigError(
        f"expects {expected}, got {describe(value)}",
        why=f"this key means: {key.meaning}",
        fix=f"for example {key.path}={yaml_value(example)} (the default)",
        where=place(key.path, value, origin),
        code="R11",
    )


def describe(value: Any) -> str:
    """Return a value with its kind: ``the string 'abc'``, ``the number 0.5``, ``a list``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the truth value {yaml_value(value)}"
    if isinstance(value, int | float):
        return f"the number {value:g}" if isinstance(value, float) else f"the number {value}"
    if isinstance(value, str):
        return f"the string '{value}'"
    return f"a {'mapping' if isinstance(value, dict) else type(value).__name__} ({yaml_value(value)})"


def yaml_value(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(yaml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{yaml_value(item)}" for name, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bound_complaints(key: KeyDoc, value: Any, where: Callable[[], str]) -> Iterator[ConfigError]:
    values = value if isinstance(value, list) else [value]
    bad = [item for item in values if isinstance(item, int | float) and not _within(item, key.metadata)]
    if bad:
        shown = ", ".join(f"{item:g}" for item in bad)
        limits = key.allowed or "a finite number"
        yield ConfigError(
            f"must be {limits}, got {shown}",
            why=f"this key means: {key.meaning}",
            fix=f"{key.path}={yaml_value(key.default)} is the default",
            where=where(),
            code="R11",
        )


def _within(value: float, metadata: dict[str, Any]) -> bool:
    low, high, above = metadata.get("low"), metadata.get("high"), metadata.get("above")
    return (
        math.isfinite(value)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )


def _number_for_name(key: KeyDoc, value: str, where: Callable[[], str]) -> ConfigError:
    wanted, instead = key.metadata["names"], key.metadata["instead"]
    return ConfigError(
        f"expects the name of {article(wanted)}, got the number {value}",
        why=f"this key chooses a method: {key.meaning}",
        fix=f"the number goes to {instead}={value}" if instead else f"{key.path}={key.default}",
        where=where(),
        code="R11",
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
