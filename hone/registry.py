"""One registry for everything that is chosen by name: estimators, losses, engines, scorers, trackers.

A name with a colon, ``my_module:my_estimator``, is no entry but an import path: the object is taken from that module, which
lies in the current directory or on ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

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
        adopt: makes an entry of an object that an import path named (and of its path), or raises TypeError with what it
            should have been; without it import paths are not taken.
    """

    def __init__(self, kind: str, *, key: str = "", adopt: Callable[[Any, str], T] | None = None) -> None:
        self.kind, self.key, self.adopt = kind, key, adopt
        self._entries: dict[str, T] = {}
        self._imported: dict[str, T] = {}

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
        """Return the entry called ``name``, or the one that the import path ``name`` leads to.

        Raises:
            ConfigError: no such name (the message lists the nearest ones), or nothing usable at the import path.
        """
        if self.adopt is not None and ":" in name:
            return self._import(name, self.adopt)
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

    def _import(self, path: str, adopt: Callable[[Any, str], T]) -> T:
        if path not in self._imported:
            found = imported(path, self.key)
            try:
                self._imported[path] = adopt(found, path)
            except TypeError as error:
                raise ConfigError(f"'{path}' is no {self.kind}: {error}", where=self.key) from error
        return self._imported[path]


def imported(path: str, key: str = "") -> Any:
    """Return what ``module:attribute`` names; the module may lie in the current directory.

    Raises:
        ConfigError: no such module or attribute, or the module raised while it was imported.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(
            f"'{path}' is no import path", where=key, fix="write module:attribute, as in my_file:my_function"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # behind everything installed: a file called random.py shadows nothing
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise _broken(module_name, error, key) from error
        files = sorted(file.stem for file in Path.cwd().glob("*.py"))
        raise ConfigError(
            f"there is no module '{module_name}' (for '{path}') in {here} or on PYTHONPATH",
            where=key,
            fix=did_you_mean(module_name, files) if files else "run from the directory that holds the file",
        ) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's file raises is the user's to see
        raise _broken(module_name, error, key) from error
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigError(
            f"{getattr(module, '__file__', module_name)} has no '{attribute}'",
            where=key,
            fix=did_you_mean(attribute, public),
        )
    return getattr(module, attribute)


def _broken(module_name: str, error: BaseException, key: str) -> ConfigError:
    place = next((f", line {frame.lineno}" for frame in reversed(traceback.extract_tb(error.__traceback__))
                  if Path(frame.filename).stem == module_name.rpartition(".")[2]), "")  # fmt: skip
    return ConfigError(
        f"module '{module_name}' cannot be imported{place}: {type(error).__name__}: {error}",
        where=key,
        fix="mend the file; --debug shows the traceback",
    )
