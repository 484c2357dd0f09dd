"""An engine's own arguments, as its back end checks them before the engine starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hone.errors import ConfigError, did_you_mean


def check_names(engine: str, options: Mapping[str, Any], known: Iterable[str], *, called: str) -> None:
    """Every option is an argument that the engine has.

    Args:
        engine: as in ``rollout.name``.
        options: that it is to be started with.
        known: names that it takes.
        called: the engine's own name, for people.

    Raises:
        ConfigError: one is not.
    """
    names = list(known)
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise refused(engine, f"{called} has no argument '{unknown[0]}'", did_you_mean(unknown[0], names))


def check_owned(engine: str, given: Mapping[str, Any], owned: Mapping[str, str]) -> None:
    """No option of the user is one that Hone decides on.

    Args:
        engine: as in ``rollout.name``.
        given: options of the user.
        owned: what Hone decides on, with the reason.

    Raises:
        ConfigError: one is.
    """
    for name in sorted(set(given) & set(owned)):
        where = f"actor_rollout_ref.rollout.engine_kwargs.{engine}.{name}"
        raise ConfigError(
            f"engine {engine} cannot be given '{name}': {owned[name]}", fix=f"leave {where} out", where=where
        )


def refused(engine: str, what: str, fix: str) -> ConfigError:
    """The error of an engine that does not take its arguments."""
    where = f"actor_rollout_ref.rollout.engine_kwargs.{engine}"
    return ConfigError(
        what, why=f"{where.removeprefix('actor_rollout_ref.')} is passed on as it is", fix=fix, where=where
    )


def first_lines(error: Exception) -> str:
    """What an engine says of its arguments, without its traceback."""
    return " ".join(line.strip() for line in str(error).splitlines()[:4])
