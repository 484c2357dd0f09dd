"""Registry of objects that are chosen by name: estimators, losses, engines, scorers, trackers.

A name with a colon, ``my_module:my_estimator``, is an import path: the object is taken from that module, which must be in the
current directory or on ``PYTHONPATH``. ``function:NAME`` names an object of this process (:mod:`hone.user_objects`).
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from hone.errors import UnknownMethod, did_you_mean
from hone.user_code import require_admitted
from hone.user_objects import is_user_object, user_object

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from names to objects, which suggests similar names for an unknown one.

    >>> colours: Registry[str] = Registry("colour")
    >>> _ = colours.register("red")("#f00")
    >>> colours.get("red")
    '#f00'

    Args:
        kind: kind of the registered objects, in singular, for error messages ("advantage estimator").
        key: configuration key that selects an entry, for error messages.
        adopt: converts an imported object (and its path) to an entry, or raises TypeError with the reason; without it,
            import paths are not accepted.
    """

    def __init__(self, kind: str, *, key: str = "", adopt: Callable[[Any, str], T] | None = None) -> None:
        self.kind, self.key, self.adopt = kind, key, adopt
        self._entries: dict[str, T] = {}
        self._later: dict[str, str] = {}  # module that registers each name, or path of its entry
        self._imported: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under ``names``; it returns the object unchanged.

        Raises:
            ValueError: a different object already has one of the names.
        """

        def decorate(entry: T) -> T:
            for name in names:
                if self._entries.get(name, entry) is not entry:
                    raise ValueError(f"{self.kind} '{name}' is already registered")
                self._entries[name] = entry
            return entry

        return decorate

    def register_later(self, module: str, *names: str) -> None:
        """Let a module register ``names`` when one of them is first used; ``module:attribute`` is itself the entry."""
        self._later |= dict.fromkeys(names, module)

    def get(self, name: str, *, key: str | None = None) -> T:
        """Return the entry called ``name``, or the one at the import path ``name``.

        Args:
            name: name of the entry.
            key: configuration key with the name, for error messages; None means the registry's.

        Raises:
            UnknownMethod: the name does not exist (the message lists similar ones), or the import path is not usable.
        """
        if self.adopt is not None and ":" in name:
            return self._import(name, self.adopt, self.key if key is None else key)
        if name in self._later and name not in self._entries:
            module, _, attribute = self._later[name].partition(":")
            place = importlib.import_module(module)
            if attribute:
                self._entries[name] = getattr(place, attribute)
        try:
            return self._entries[name]
        except KeyError:
            raise UnknownMethod(
                f"unknown {self.kind} '{name}'",
                where=self.key if key is None else key,
                fix=did_you_mean(name, self.names()),
            ) from None

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted({*self._entries, *self._later})

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._later

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _import(self, path: str, adopt: Callable[[Any, str], T], key: str) -> T:
        if path not in self._imported or is_user_object(path):  # a notebook cell may define it again
            target = imported(path, key)
            try:
                self._imported[path] = adopt(target, path)
            except TypeError as error:
                raise UnknownMethod(f"'{path}' is not a valid {self.kind}: {error}", where=key) from error
        return self._imported[path]


def imported(path: str, key: str = "") -> Any:
    """Import ``module:attribute``; the module may be in the current directory. Return an object of this process by its name.

    Raises:
        ConfigError: the module, attribute or object does not exist, or importing the module failed.
        HoneError: somebody looks at runs (:func:`hone.user_code.looking`).
    """
    if is_user_object(path):
        return user_object(path).value
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute.isidentifier():
        raise UnknownMethod(
            f"'{path}' is not an import path", where=key, fix="write module:attribute, such as my_file:my_function"
        )
    require_admitted(module_name)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # after installed packages, so that a file called random.py shadows nothing
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise _broken(module_name, error, key) from error
        files = sorted(file.stem for file in Path.cwd().glob("*.py"))
        raise UnknownMethod(
            f"module '{module_name}' (of '{path}') does not exist in {here} or on PYTHONPATH",
            where=key,
            fix=did_you_mean(module_name, files) if files else "run from the directory of the file",
        ) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - report any error of the user's file
        raise _broken(module_name, error, key) from error
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UnknownMethod(
            f"{getattr(module, '__file__', module_name)} has no '{attribute}'",
            where=key,
            fix=did_you_mean(attribute, public),
        )
    return getattr(module, attribute)


def _broken(module_name: str, error: BaseException, key: str) -> UnknownMethod:
    place = next((f", line {frame.lineno}" for frame in reversed(traceback.extract_tb(error.__traceback__))
                  if Path(frame.filename).stem == module_name.rpartition(".")[2]), "")  # fmt: skip
    return UnknownMethod(
        f"module '{module_name}' cannot be imported{place}: {type(error).__name__}: {error}",
        where=key,
        fix="correct the file; --debug shows the traceback",
    )
