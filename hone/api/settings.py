"""Keyword arguments as configuration keys."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hone.config import load_config
from hone.config.keys import key_named, raise_together, unknown_key
from hone.config.load import PYTHON_NAMES
from hone.config.migration.reading import Outcome, outcome_text, trl_error, trl_setting
from hone.config.overrides import hydra_value
from hone.config.trees import AnyConfig, model_block
from hone.errors import ConfigError, HoneError

log = logging.getLogger("hone")

Tree = TypeVar("Tree", bound=AnyConfig)
P = ParamSpec("P")
R = TypeVar("R")


def build_config(
    tree: type[Tree],
    values: Mapping[str, Any],
    *,
    preset: str | None = None,
    config: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Tree:
    """Return the configuration of a run, with names of the hub as they were given.

    Precedence: defaults < preset < ``config`` < keyword arguments < ``overrides``.

    Args:
        tree: root of the configuration.
        values: keyword arguments: dotted keys, or the last part of a key that no other key ends with.
        preset: a preset of the command.
        config: nested mappings or dotted keys.
        overrides: ``key=value`` in Hydra's grammar, as on the command line.

    Raises:
        ConfigError: a key is unknown or ambiguous, or a value is wrong.
    """
    import yaml

    values = {**flat_values(config or {}), **{find_key(tree, name): value for name, value in values.items()}}
    with tempfile.TemporaryDirectory(prefix="hone-arguments-") as folder:
        where: dict[str, Any] = {}
        if values:
            (Path(folder) / "arguments.yaml").write_text(
                yaml.safe_dump(_nested(values), sort_keys=False), encoding="utf-8"
            )
            where = {"config_path": folder, "config_name": "arguments"}
        return load_config(tree, list(overrides), preset=preset, **where)


def override_words(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={hydra_value(value)}" for key, value in values.items()]


def model_key(tree: type[AnyConfig]) -> str:
    return f"{model_block(tree())[0]}.path"


def find_key(tree: type[AnyConfig], name: str) -> str:
    """Return the key that a keyword argument names: a dotted key, or the end of one.

    See :func:`hone.config.keys.key_named`.

    Raises:
        ConfigError: no key has this name, or several are equally near.
    """
    if "." in name:
        return name
    key = key_named(name, tree)
    if not key:
        raise unknown_key(name, tree)
    return key


ARGUMENTS = {
    "data.train_files": "dataset",
    "data.val_files": "val_dataset",
    "reward.custom_reward_function.path": "reward",
    **{key: name for name, key in PYTHON_NAMES.items()},
    "actor_rollout_ref.model.path": "model",
    "model.path": "model",
}
"""Arguments of the functions that train, by the key that they set."""


def takes_names_of_trl(tree: type[AnyConfig]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take the names that TRL gives to arguments and settings, where they mean the same.

    One line in the log names what each is here. Raises ConfigError: a name means something else, or is given twice.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(*args, **_translated(tree, kwargs, [*parameters], [*parameters][: len(args)]))  # type: ignore[arg-type]

        return call

    return decorate


def _translated(
    tree: type[AnyConfig], given: Mapping[str, Any], parameters: Collection[str], positional: Collection[str]
) -> dict[str, Any]:
    from hone.cli.main import log_to_stderr

    readings = {name: trl_setting(name, value, given, tree) for name, value in given.items() if name not in parameters}
    raise_together([trl_error(r) for r in readings.values() if r is not None and r.outcome is Outcome.UNSUPPORTED])
    log_to_stderr()
    values: dict[str, Any] = {}
    for name, value in given.items():
        reading = readings.get(name)
        if reading is None:
            values[name] = value
            continue
        sets = {ARGUMENTS.get(key, key): entry for key, entry in reading.sets.items()}
        twice = [key for key in sets if key in parameters and (key in given or key in positional)]
        if twice:
            raise ConfigError(
                f"{twice[0]} and {name} are both given, and are the same", fix=f"leave out {name}", code="R09"
            )
        values |= sets
        if sets.keys() & set(parameters):
            shown = f"the argument {', '.join(sets)}"
        else:
            shown = outcome_text(replace(reading, says="" if sets else reading.says))
        log.info("%s is a name of TRL: %s", name, shown)
    return values


def flat_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_flat(tree))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *blocks, last = key.split(".")
        branch = tree
        for block in blocks:
            branch = branch.setdefault(block, {})
        branch[last] = _plain(value)
    return tree


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


DEBUG_VARIABLE = "HONE_DEBUG"
"""Environment variable that keeps the internal frames in the traceback of a user's mistake."""


def api_call(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function callable in a notebook, and raise its :class:`HoneError` without the frames inside the package.

    A function that starts event loops of its own cannot run inside the loop of a notebook, because asyncio refuses a loop within
    a loop. The notebook's loop is taken from this thread for the time of the call.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            return function(*args, **kwargs)
        except HoneError as error:
            if os.environ.get(DEBUG_VARIABLE):
                raise
            raise error.with_traceback(None) from None
        finally:
            if outer is not None:
                asyncio.set_event_loop(outer)
                asyncio._set_running_loop(outer)

    return call
