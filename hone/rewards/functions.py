"""Reward functions of this process, such as those of notebook cells, named in a configuration and sent to worker processes.

A configuration names one as ``function:NAME``. The worker receives it by cloudpickle over the pool's socket, from the process in which
the user defined it. It is never read from a file, so a resumed run must get the function again.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.errors import RewardError

PREFIX = "function:"
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def register_function(function: Callable[..., Any]) -> str:
    """Keep a function for the runs of this process; return its name in a configuration."""
    name = getattr(function, "__name__", type(function).__name__)
    path = PREFIX + name
    _FUNCTIONS[path] = function
    return path


def registered_function(path: str) -> Callable[..., Any]:
    """Return a registered function.

    Raises:
        RewardError: this process has none of that name.
    """
    try:
        return _FUNCTIONS[path]
    except KeyError:
        raise RewardError(
            f"this process has no reward function '{path.removeprefix(PREFIX)}'",
            why="the run was started from Python, with a function that is in no file",
            fix="start it again with hone.train(reward=...), or put the function into a file: "
            "reward.custom_reward_function.path=FILE.py",
            where="reward.custom_reward_function.path",
        ) from None


def pickled(function: Callable[..., Any]) -> bytes:
    """Return a function as bytes that a worker can load without importing the user's module.

    Raises:
        RewardError: the function refers to something that cannot be sent to another process.
    """
    import cloudpickle

    module = inspect.getmodule(function)
    by_value = module is not None and module.__name__ != "__main__" and not _is_installed(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(function)
    except Exception as error:  # pickling runs code of the user's objects
        raise RewardError(
            f"the reward function cannot be sent to its worker processes: {error}",
            why="it refers to an object that exists in this process only",
            fix="create such objects inside the function, or in a file named by reward.custom_reward_function.path",
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def source_hash(function: Callable[..., Any]) -> str:
    """Return the hash of a function's source, or of its pickled form where the source is unknown."""
    try:
        code = inspect.getsource(function).encode()
    except (OSError, TypeError):
        code = pickled(function)
    return hashlib.sha256(code).hexdigest()


def _is_installed(module: Any) -> bool:
    """Return whether a worker can import the module: it is installed, or part of Python."""
    file = getattr(module, "__file__", None)
    if file is None:
        return True
    roots = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    return "site-packages" in Path(file).parts or any(root in Path(file).resolve().parents for root in roots)
