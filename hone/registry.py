"""One registry for everything that is chosen by name: estimators, losses, engines, scorers, trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hone.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to objects, with "did you mean" on a miss.

    >>> colours: Registry[str] = Registry("colour")
    >>> _ = colours.register("red")("#f00")
    >>> colours.get("red")
    '#f00'

    Args:
        kind: what is registered, in singular, as it appears in error messages ("advantage estimator").
        key: the configuration key that selects an entry, shown in the fix of an error.
    """

    def __init__(self, kind: str, *, key: str = "") -> None:
        self.kind, self.key = kind, key
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under ``names``; it returns the object unchanged.

        Raises:
            ValueError: a different object already has one of the names.
        """

        def decorate(entry: T) -> T:
            for name in names:
                if self._entries.get(name, entry) is not entry:
                    raise ValueError(f"{self.kind} '{name}' is registered already")
                self._entries[name] = entry
            return entry

        return decorate

    def get(self, name: str) -> T:
        """Return the entry called ``name``.

        Raises:
            ConfigError: no such name; the message lists the nearest ones.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise ConfigError(
                f"unknown {self.kind} '{name}'",
                where=self.key,
                fix=did_you_mean(name, self._entries),
            ) from None

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
