"""Translation of another trainer's keys: five kinds of entry, and their table.

A pattern matches one or many keys: ``{a,b}`` stands for either word, ``*`` for one part of the path, and ``**`` at the end
for the block and everything in it. The most specific entry applies: an exact path before a pattern, a long pattern before a
short one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.config.keys import yaml_value

OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "disable", "disabled", "none")  # values that switch a feature off

Others = Mapping[str, Any]  # values of all other keys of the configuration


class Refused(Exception):
    """An unsupported value.

    Args:
        instead: alternative.
        stand_in: nearest keys and values, for a translated configuration.
    """

    def __init__(self, what: str, instead: str, stand_in: dict[str, Any] | None = None) -> None:
        super().__init__(what)
        self.what, self.instead, self.stand_in = what, instead, stand_in or {}


@dataclass(frozen=True)
class Renamed:
    """Another name of a key, such as an older spelling.

    When ``to`` ends in ``.*``, the rest of the path after the pattern's block is appended to it.
    """

    to: str
    says: str = ""


@dataclass(frozen=True)
class Changed:
    """The same setting with other keys or values; ``sets(value, others)`` returns them, or raises :class:`Refused`."""

    says: str
    sets: Callable[[Any, Others], dict[str, Any]]
    to: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settled:
    """A fixed behaviour of Hone; ``only`` holds the values that match it (None: any), others are refused."""

    says: str
    only: tuple[Any, ...] | None = None
    instead: str = ""


@dataclass(frozen=True)
class Unsupported:
    """An unsupported feature; values of ``off`` switch it off and are accepted."""

    what: str
    instead: str
    off: tuple[Any, ...] = OFF


@dataclass(frozen=True)
class Foreign:
    """A key of a backend that Hone does not use; it has no meaning and is skipped."""

    reason: str


Entry = Renamed | Changed | Settled | Unsupported | Foreign


@dataclass(frozen=True)
class Table:
    """Entries by pattern.

    >>> table = Table({"critic.{a,b}": Foreign("x"), "critic.**": Foreign("y"), "critic.c": Foreign("z")})
    >>> [table.find(key).reason for key in ("critic.a", "critic.b.c", "critic.c", "critic")]
    ['x', 'y', 'z', 'y']
    """

    entries: Mapping[str, Entry]
    _exact: dict[str, Entry] = field(default_factory=dict, repr=False)
    _patterns: list[tuple[re.Pattern[str], Entry]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        patterns = []
        for pattern, entry in self.entries.items():
            for path in expand(pattern):
                if "*" in path:
                    patterns.append((path, entry))
                elif path in self._exact:
                    raise ValueError(f"{path} has two entries")
                else:
                    self._exact[path] = entry
        patterns.sort(key=lambda item: -len(item[0].replace("*", "")))
        self._patterns.extend((_compiled(path), entry) for path, entry in patterns)

    def find(self, path: str) -> Entry | None:
        """Return the entry of the key ``path``."""
        if path in self._exact:
            return self._exact[path]
        for pattern, entry in self._patterns:
            match = pattern.fullmatch(path)
            if match and isinstance(entry, Renamed) and entry.to.endswith(".*"):
                return Renamed(entry.to[:-2] + (match.group("rest") or ""), entry.says)
            if match:
                return entry
        return None

    def paths(self) -> dict[str, Entry]:
        """Return the entries by path, with braces expanded and stars kept."""
        return {path: entry for pattern, entry in self.entries.items() for path in expand(pattern)}


def expand(pattern: str) -> list[str]:
    """Return the paths that a pattern's braces stand for.

    >>> expand("{actor,critic}.{x,y.z}")
    ['actor.x', 'actor.y.z', 'critic.x', 'critic.y.z']
    """
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(words) for words in itertools.product(*choices)]


def _compiled(path: str) -> re.Pattern[str]:
    body, rest = (path[:-3], r"(?P<rest>\..+)?") if path.endswith(".**") else (path, "")
    return re.compile(r"[^.]+".join(re.escape(part) for part in body.split("*")) + rest)


def described(entry: Entry | None) -> str:
    """Return the translation of a key as a sentence."""
    match entry:
        case Renamed(to, says):
            return f"Another name of {to}" + (f": {says}." if says else ".")
        case Changed(says, _, to):
            return f"Taken as {', '.join(to)}" + (f": {says}." if says else ".") if to else f"Known: {says}."
        case Settled(says, only, instead):
            others = f" Other values than {yaml_value(list(only))} are not supported yet: {instead}." if only else ""
            return f"Always so here: {says}.{others}"
        case Unsupported(what, instead, _):
            return f"Not supported yet: {what}. Instead: {instead}."
        case Foreign(reason):
            return f"No meaning here: {reason}."
    return "Not known."


def kind(entry: Entry) -> str:
    """Return the heading under which the documentation lists an entry."""
    match entry:
        case Renamed() | Changed():
            return "Other names"
        case Settled():
            return "Always so here"
        case Unsupported():
            return "Not supported yet"
        case Foreign():
            return "Without meaning here"
