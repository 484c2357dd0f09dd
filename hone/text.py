"""Valid text: strings without lone surrogates.

JSON's escape ``\\ud800`` decodes to half of a surrogate pair. It is not a character: tokenizers, UTF-8 files and services refuse it.
Such text is treated by its use:

- a tool call of the model is malformed, and the model receives the reason (``hone/agents/parsers``);
- text from a tool, an environment, a service or a reward function is repaired by :func:`valid_data`;
- a dataset row is refused with its file and number by :func:`check_valid`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from hone.errors import DataError

REPLACEMENT = "\ufffd"
"""Character that replaces a lone surrogate."""

_MOST_VALUES = 10**6
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_yaml(text: str) -> Any:
    """Return YAML's plain values, read by libyaml where it is installed, eight times as fast as Python's reader.

    Raises:
        yaml.YAMLError: the text is not YAML, or its aliases repeat a part within itself or more than a million values.
    """
    import yaml  # the watchdog and reward workers start without it

    value = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if "*" in text and _values_of(value, {}) > _MOST_VALUES:
        raise yaml.YAMLError(f"aliases make it more than {_MOST_VALUES} values, or a part contains itself")
    return value


def _values_of(value: Any, known: dict[int, float]) -> float:
    """Return the number of values with every alias written out; infinite for one that contains itself."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_values_of(part, known) for part in parts)
    return known[id(value)]


def json_lines(text: str) -> list[str]:
    """Return the lines of a JSON lines document, which only line feeds separate: strings may contain other line separators.

    >>> json_lines('"a\u2028b"\n1\n') == ['"a\u2028b"', "1"]
    True
    """
    return text.removesuffix("\n").split("\n") if text else []


def replace_between(page: str, begin: str, end: str, text: str) -> str:
    r"""Return a page with a new text between two markers; the rest is unchanged.

    >>> replace_between("a <1> old <2> b", "<1>", "<2>", "new")
    'a <1>\n\nnew\n\n<2> b'

    Raises:
        ValueError: the page does not have each marker exactly once.
    """
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(
            f"the page has {page.count(begin)} begin markers and {page.count(end)} end markers, not one each"
        )
    return f"{page.partition(begin)[0]}{begin}\n\n{text}\n\n{end}{page.partition(end)[2]}"


def valid_text(text: str) -> str:
    r"""Replace every lone surrogate.

    >>> valid_text("a\ud800b")
    'a\ufffdb'
    """
    return _SURROGATE.sub(REPLACEMENT, text)


def valid_data(value: Any) -> Any:
    """Return nested data with :func:`valid_text` applied to all strings, those of keys included."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, Mapping):
        return {valid_data(key): valid_data(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [valid_data(entry) for entry in value]
    return tuple(map(valid_data, value)) if type(value) is tuple else value


def invalid_place(value: Any) -> str | None:
    r"""Return the place of a lone surrogate in nested data, or None if there is none.

    >>> invalid_place({"prompt": [{"content": "ok"}, {"content": "\ud800"}]})
    'prompt[1].content'
    """
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        place, entry = waiting.pop()
        if isinstance(entry, str):
            if _SURROGATE.search(entry):
                return place
        elif isinstance(entry, Mapping):
            for key, item in entry.items():
                name = valid_text(str(key))
                if name != str(key):
                    return place or name
                waiting.append((f"{place}.{name}" if place else name, item))
        elif isinstance(entry, list | tuple):
            waiting += [(f"{place}[{number}]", item) for number, item in enumerate(entry)]
    return None


def is_valid(value: Any) -> bool:
    """Return whether nested data has no lone surrogate."""
    return invalid_place(value) is None


def check_valid(value: Any, where: str) -> None:
    """Check that nested data has no lone surrogate.

    Raises:
        DataError: it has one; the message names its place.
    """
    place = invalid_place(value)
    if place is not None:
        raise DataError(
            f"{place or 'the text'} contains a lone surrogate (JSON's escape \\ud800 to \\udfff)",
            where=where,
            why="it is half of a character, which no tokenizer accepts",
            fix="remove it, or replace it by U+FFFD",
        )
