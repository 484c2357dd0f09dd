"""Checks of an engine's arguments before the engine starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hone.errors import ConfigError, did_you_mean


def check_names(engine: str, options: Mapping[str, Any], known: Iterable[str], *, title: str) -> None:
    """Check that every option is an argument of the engine.

    Args:
        engine: as in ``rollout.name``.
        options: to check.
        known: names of the engine's arguments.
        title: of the engine, for the message.

    Raises:
        ConfigError: an option is unknown.
    """
    names = list(known)
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise refused(engine, f"{title} has no argument '{unknown[0]}'", did_you_mean(unknown[0], names))


def check_owned(engine: str, given: Mapping[str, Any], owned: Mapping[str, str]) -> None:
    """Check that the user sets no option that Hone sets.

    Args:
        engine: as in ``rollout.name``.
        given: options of the user.
        owned: options that Hone sets, with the reason.

    Raises:
        ConfigError: the user sets one.
    """
    for name in sorted(set(given) & set(owned)):
        where = f"actor_rollout_ref.rollout.engine_kwargs.{engine}.{name}"
        raise ConfigError(f"engine {engine} cannot have '{name}': {owned[name]}", fix=f"remove {where}", where=where)


def refused(engine: str, what: str, fix: str) -> ConfigError:
    """Return the error for an engine that refuses its arguments."""
    where = f"actor_rollout_ref.rollout.engine_kwargs.{engine}"
    return ConfigError(
        what, why=f"{where.removeprefix('actor_rollout_ref.')} is passed to the engine unchanged", fix=fix, where=where
    )


def first_lines(error: Exception) -> str:
    """Return the first four lines of an engine's error."""
    return " ".join(line.strip() for line in str(error).splitlines()[:4])
