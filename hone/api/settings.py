"""Keyword arguments as configuration keys."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hone.config import load_config
from hone.config.trees import AnyConfig, model_block
from hone.errors import ConfigError, HoneError, did_you_mean

BLOCKS = (
    "trainer.", "data.", "algorithm.", "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.",
    "actor_rollout_ref.model.", "optim.", "model.", "loss.", "reward.",
)  # fmt: skip
"""Blocks in which a keyword argument is looked up first, in this order; keys of other models come last."""

Tree = TypeVar("Tree", bound=AnyConfig)


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
    return [f"{key}={_word(value)}" for key, value in values.items()]


def model_key(tree: type[AnyConfig]) -> str:
    return f"{model_block(tree())[0]}.path"


def find_key(tree: type[AnyConfig], name: str) -> str:
    """Return the key that a keyword argument names: a dotted key, or the end of one.

    Of several keys with that end, the one of the first block in :data:`BLOCKS` is meant, and in it the least nested.

    Raises:
        ConfigError: no key has this name, or several are equally near.
    """
    if "." in name:
        return name
    ending = [key for key in keys_of(tree()) if key.rpartition(".")[2] == name]
    if not ending:
        names = {key.rpartition(".")[2] for key in keys_of(tree())}
        raise ConfigError(f"no key is named '{name}'", where=name, fix=did_you_mean(name, names), code="R09")
    least = min(_distance(key) for key in ending)
    nearest = [key for key in ending if _distance(key) == least]
    if len(nearest) > 1:
        raise ConfigError(
            f"{len(nearest)} keys are named '{name}': {', '.join(nearest)}",
            where=name,
            fix=f"config={{'{nearest[0]}': ...}}",
            code="R09",
        )
    return nearest[0]


def _distance(key: str) -> tuple[int, int]:
    block = next((number for number, start in enumerate(BLOCKS) if key.startswith(start)), len(BLOCKS))
    return block, key.count(".")


def keys_of(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values of a tree."""
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


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


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return f"'{value}'"


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


P = ParamSpec("P")
R = TypeVar("R")

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
