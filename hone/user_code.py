"""Python files of the user: reward functions, tools, dataset and sampler classes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hone.errors import HoneError, did_you_mean
from hone.user_objects import is_installed


class UserCodeError(Exception):
    """A file of the user cannot be loaded.

    Attributes:
        what: the problem in one sentence.
        fix: the fix.
        trace: traceback of the error; empty if the file was not executed.
    """

    def __init__(self, what: str, fix: str, trace: str = "") -> None:
        super().__init__(what)
        self.what, self.fix, self.trace = what, fix, trace


_admitted: set[str] | None = None
"""Files and modules that may be run while somebody looks at runs; None: all."""


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Run no code of a user inside, in any thread, but what :func:`admit` names."""
    global _admitted
    before, _admitted = _admitted, set()
    try:
        yield
    finally:
        _admitted = before


def admit(names: Collection[str] | None) -> None:
    """Let files, and modules of import paths, be run inside of :func:`looking`; None: all."""
    global _admitted
    if names is None or _admitted is None:
        _admitted = None
        return
    for name in names:
        module = name.removeprefix("pkg://")
        file = Path(module if module.endswith((".py", ".pyc", ".so")) else module.partition(":")[0])
        _admitted |= {module.partition(":")[0], module.rpartition(".")[0], str(file.expanduser().resolve())}


def require_admitted(name: str) -> None:
    """Check that a file or module may be run.

    Raises:
        HoneError: somebody looks at runs, and it was not admitted (code E-trust).
    """
    if _admitted is not None and name not in _admitted and not name.startswith("hone."):
        raise HoneError(
            f"'{name}' is code, which this command does not run",
            why="looking at a run that somebody sent would run a program of theirs with your rights",
            fix="read it, then add --trust once where the command has it",
            code="E-trust",
        )


def load_file(path: Path, name: str | None = None) -> ModuleType:
    """Execute a Python file as a module, called like the file unless a name is given; its folder becomes importable.

    Raises:
        UserCodeError: the file is not Python, or raises.
    """
    name = name or path.stem
    require_admitted(str(path.expanduser().resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{path} is not a Python file", "name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # any error of the file is reported to the user
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" at line {lines[-1]}" if lines else ""
        raise UserCodeError(
            f"importing {path} failed{line}: {last_line(error)}", "fix the file", traceback.format_exc()
        ) from error
    return module


def load_class(path: str, name: str | None) -> type:
    """Load a class of a file, or of a module given as ``package.module`` (verl writes ``pkg://package.module``).

    Args:
        path: file or module.
        name: name of the class; None takes the only class that the file defines.

    Raises:
        UserCodeError: the file or the class does not exist, or the file cannot be executed.
    """
    module = _load(path)
    defined = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    }
    if name is None:
        if len(defined) == 1:
            return next(iter(defined.values()))
        raise UserCodeError(
            f"{path} defines {len(defined)} classes", f"name one: {', '.join(defined) or 'it has none'}"
        )
    value = getattr(module, name, None)
    if not isinstance(value, type):
        raise UserCodeError(f"{path} has no class '{name}'", did_you_mean(name, list(defined)))
    return value


def load_function(place: str) -> Callable[..., Any]:
    """Load a function that is written as ``FILE.py:NAME`` or ``package.module:NAME``.

    Raises:
        UserCodeError: it is written otherwise, does not exist, or the file cannot be executed.
    """
    path, _, name = place.rpartition(":")
    if not path or not name.isidentifier():
        raise UserCodeError(f"{place!r} names no function", "write FILE.py:NAME")
    module = _load(path)
    if not callable(function := getattr(module, name, None)):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise UserCodeError(f"{path} has no function '{name}'", did_you_mean(name, functions))
    return function


def build(cls: type, arguments: Mapping[str, Any]) -> Any:
    """Build an object with those of the arguments that its class takes.

    Raises:
        UserCodeError: the class needs other arguments, or raises.
    """
    try:
        parameters = inspect.signature(cls).parameters.values()
    except ValueError:  # a class in C without a signature
        parameters = ()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    given = {name: value for name, value in arguments.items() if takes_all or name in names}
    missing = [p.name for p in parameters if p.default is p.empty and p.kind in _NAMED and p.name not in given]
    if missing:
        raise UserCodeError(
            f"class '{cls.__name__}' needs {', '.join(missing)}",
            f"take some of these arguments: {', '.join(arguments)}; give others a default",
        )
    return call(cls.__name__, lambda: cls(**given))


def call(name: str, function: Callable[[], Any]) -> Any:
    """Return the value of a call into the user's code.

    Raises:
        UserCodeError: the code raises.
    """
    try:
        return function()
    except Exception as error:  # any error of the user's code is reported to the user
        raise UserCodeError(f"'{name}' failed: {last_line(error)}", "fix its code", traceback.format_exc()) from error


def last_line(error: BaseException) -> str:
    """Return type and message of an error, as the last line of a traceback has them."""
    return traceback.format_exception_only(error)[-1].strip()


def place_of(error: BaseException) -> str:
    """Return where the user's code raised an error, such as `` (price.py, line 3, in reward)``; empty if no frame is the user's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_installed(frame.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _load(path: str) -> ModuleType:
    if path.endswith(".py") or "/" in path.removeprefix("pkg://"):
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            near = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
            raise UserCodeError(
                f"file {path} does not exist", did_you_mean(file.name, near) if near else "check the path"
            )
        return load_file(file)
    module = path.removeprefix("pkg://")
    require_admitted(module)
    try:
        return importlib.import_module(module)
    except Exception as error:  # importing executes the user's code
        raise UserCodeError(
            f"module {module} cannot be imported: {last_line(error)}",
            "install it, or name a file: PATH/FILE.py",
            traceback.format_exc(),
        ) from error


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
