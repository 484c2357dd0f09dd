"""Checks of an engine's arguments before the engine starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hone.errors import ConfigError, RequestError, did_you_mean
from hone.generation.protocol import SamplingParams

MAX_CHARACTERS = 2000
"""Maximum length of an engine's error in a message; its log has all of it."""
UNREPORTED = ("report_support",)
"""Sampling parameters that no engine in an environment of its own can serve."""
ADJUSTMENTS = ("constraint", "presence_penalty", "frequency_penalty", "logit_bias", "top_log_probs", *UNREPORTED)
"""Sampling parameters that need an engine's help to report both log-probs."""
_UNCHANGED = SamplingParams()
_LINK = "For further information visit"


def check_names(engine: str, options: Mapping[str, Any], known: Iterable[str], *, title: str) -> None:
    """Check that every option is a ``known`` argument of the engine; the message calls it ``title``."""
    names = list(known)
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise refused(engine, f"{title} has no argument '{unknown[0]}'", did_you_mean(unknown[0], names))


def check_owned(engine: str, given: Mapping[str, Any], owned: Mapping[str, str]) -> None:
    """Check that the user sets no option of ``owned``, which Hone sets; it has the reasons."""
    for name in sorted(set(given) & set(owned)):
        where = f"actor_rollout_ref.rollout.engine_kwargs.{engine}.{name}"
        raise ConfigError(f"engine {engine} cannot have '{name}': {owned[name]}", fix=f"remove {where}", where=where)


def check_served(title: str, sampling: SamplingParams, unserved: Iterable[str]) -> None:
    """Check that a request has none of the sampling parameters that an engine cannot serve."""
    for name in unserved:
        if getattr(sampling, name) != getattr(_UNCHANGED, name):
            raise RequestError(
                f"{title} cannot serve a request with '{name}'",
                why="Hone could not report the log-probs of the policy and of the distribution sampled from",
                fix=f"the engine native, or a request without '{name}'",
                field=name,
            )


def refused(engine: str, what: str, fix: str) -> ConfigError:
    """Return the error for an engine that refuses its arguments."""
    where = f"actor_rollout_ref.rollout.engine_kwargs.{engine}"
    return ConfigError(
        what, why=f"{where.removeprefix('actor_rollout_ref.')} is passed to the engine unchanged", fix=fix, where=where
    )


def refused_experts(title: str, why: str) -> ConfigError:
    """Return the error about an engine that cannot report the experts of a token on a CPU."""
    return ConfigError(
        f"{title} does not report the experts of a token on a CPU",
        why=why,
        fix="actor_rollout_ref.rollout.name=native, or actor_rollout_ref.actor.router_replay.mode=disabled",
        where="actor_rollout_ref.actor.router_replay.mode",
    )


def one_line(error: Exception) -> str:
    """Return an engine's error on one line. A validation error gives every refused argument with its problem."""
    errors: Any = getattr(error, "errors", None)  # of pydantic, which only the engine's environment has
    if errors is not None:
        return "; ".join(_refused_argument(problem) for problem in errors())
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(_LINK))[:MAX_CHARACTERS]


def _refused_argument(problem: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    value = repr(problem["input"])
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    return f"{name}={shown}: {problem['msg']}" if name else str(problem["msg"])
