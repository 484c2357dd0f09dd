"""Functions and classes of this process, such as those of notebook cells, named in a configuration and sent to worker processes.

A configuration names one as ``function:NAME`` where it takes an import path. A worker receives it by cloudpickle, over a connection of
the process in which the user defined it. It is never read from a file, so a resumed run must get the object again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from hone.errors import ConfigError

PREFIX = "function:"


class UserObject:
    """A function, class or tool of the user under its name in a configuration.

    Args:
        path: name in a configuration, with the prefix.
        value: the object; left out in a process that received its code.
        code: pickled object; None pickles it when it is first needed.
        source_hash: hash of the source; None computes it when it is first needed.
    """

    def __init__(self, path: str, *value: Any, code: bytes | None = None, source_hash: str | None = None) -> None:
        self.path = path
        if value:
            (self.value,) = value
        if code is not None:
            self.code = code
        if source_hash is not None:
            self.source_hash = source_hash

    @functools.cached_property
    def value(self) -> Any:
        """The object itself."""
        import cloudpickle

        return cloudpickle.loads(self.code)

    @functools.cached_property
    def code(self) -> bytes:
        """Bytes that another process can load without importing the user's module.

        Raises:
            ConfigError: the object refers to something that cannot be sent to another process.
        """
        return _pickled(self.path.removeprefix(PREFIX), self.value)

    @functools.cached_property
    def source_hash(self) -> str:
        """Hash of the source, or of the pickled object where the source is unknown."""
        try:
            source = inspect.getsource(self.value).encode()
        except (OSError, TypeError):
            source = self.code
        return hashlib.sha256(source).hexdigest()

    def sent(self) -> UserObject:
        """Return the object in the form for another process, which loads it when it is first used.

        Raises:
            ConfigError: see :attr:`code`.
        """
        return UserObject(self.path, code=self.code, source_hash=self.source_hash)


_OBJECTS: dict[str, UserObject] = {}
_IN_USE: ContextVar[tuple[UserObject, ...]] = ContextVar("user_objects", default=())


def register_object(path: str, value: Any) -> UserObject:
    """Make an object of the user available in this process; a later one of the same name replaces it."""
    _OBJECTS[path] = UserObject(path, value)
    return _OBJECTS[path]


def receive_objects(objects: Iterable[UserObject]) -> None:
    """Make objects that another process sent available in this one."""
    _OBJECTS.update({entry.path: entry for entry in objects})


@contextlib.contextmanager
def in_use(objects: Iterable[UserObject]) -> Iterator[None]:
    """Let the runs of this context send the objects to their worker processes."""
    token = _IN_USE.set(tuple(objects))
    try:
        yield
    finally:
        _IN_USE.reset(token)


def objects_in_use() -> tuple[UserObject, ...]:
    """Return the objects that runs of this context send to their worker processes."""
    return _IN_USE.get()


def is_user_object(path: str | None) -> bool:
    """Return whether a name in a configuration is that of an object of the user."""
    return path is not None and path.startswith(PREFIX)


def user_object(path: str) -> UserObject:
    """Return a registered object.

    Raises:
        ConfigError: this process has none of that name.
    """
    try:
        return _OBJECTS[path]
    except KeyError:
        name = path.removeprefix(PREFIX)
        raise ConfigError(
            f"this process has no function or class '{name}'",
            why="the run was started from Python, with an object that is in no file",
            fix=f"start it again from Python and give {name} to the call; or put it into a file, and give its path",
            where=path,
        ) from None


def _pickled(name: str, value: Any) -> bytes:
    import cloudpickle

    with contextlib.ExitStack() as by_value:
        for module in _user_modules(value):
            cloudpickle.register_pickle_by_value(module)
            by_value.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            return cloudpickle.dumps(value)
        except Exception as error:  # pickling runs code of the user's objects
            raise ConfigError(
                f"'{name}' cannot be sent to worker processes: {error}",
                why="it refers to an object that exists in this process only",
                fix=f"create that object inside '{name}', or put '{name}' into a file and give the file's path",
                where=PREFIX + name,
            ) from error


def _user_modules(value: Any) -> list[ModuleType]:
    """Return the modules of an object, of its base classes and of the functions that it holds, which workers cannot import."""
    kind = value if isinstance(value, type) else type(value)
    attributes: Mapping[str, Any] = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    holders = [value, *kind.__mro__, *(held for held in attributes.values() if inspect.isroutine(held))]
    names = dict.fromkeys(str(getattr(holder, "__module__", None)) for holder in holders)
    modules = [sys.modules[name] for name in names if name in sys.modules and name != "__main__"]
    return [module for module in modules if not _is_installed(module)]


def _is_installed(module: ModuleType) -> bool:
    """Return whether a worker can import the module: it is installed, a part of Python, or a part of this package."""
    file = getattr(module, "__file__", None)
    return file is None or module.__name__.partition(".")[0] == "hone" or is_installed(file)


def is_installed(file: str) -> bool:
    """Return whether a file is a part of Python, of an installed package, or of this one."""
    roots = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    path = Path(file).resolve()
    inside = any(path.is_relative_to(root) for root in (*roots, Path(__file__).resolve().parent))
    return inside or "site-packages" in Path(file).parts or file.startswith("<frozen ")
