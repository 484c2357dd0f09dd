"""What an environment is: it shows something, takes a turn, and says what the turn was worth."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.agents.messages import AssistantTurn, Message
from hone.errors import ConfigError, HoneError
from hone.registry import Registry


@dataclass(frozen=True)
class Step:
    """What a turn led to.

    Attributes:
        messages: what the environment says to it; not read when it is done.
        reward: of the turn.
        done: whether the episode is over.
        facts: named numbers, logged as means over episodes; ``solved`` is 1 where the task is.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    facts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def says(cls, text: str, **rest: Any) -> Step:
        """A step that answers with one user message."""
        return cls([{"role": "user", "content": text}], **rest)


class Environment(ABC):
    """The world of one episode.

    >>> class Echo(Environment):
    ...     async def reset(self, seed):
    ...         return [{"role": "user", "content": "Say hello."}]
    ...
    ...     async def step(self, turn):
    ...         return Step(reward=float("hello" in turn.content.lower()), done=True)

    Attributes:
        tools: schemas of functions that it offers; calls come in ``turn.calls``, and each is answered by a tool message.
    """

    tools: tuple[dict[str, Any], ...] = ()

    @abstractmethod
    async def reset(self, seed: int) -> list[Message]:
        """Begin anew; what the policy is shown depends on ``seed`` and the options only."""

    @abstractmethod
    async def step(self, turn: AssistantTurn) -> Step:
        """Take a turn of the policy."""

    async def close(self) -> None:  # noqa: B027 - most have nothing to do
        """The episode is over."""


Factory = Callable[..., Environment]


def _adopt(found: Any, path: str) -> Factory:
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise TypeError("it should be a class derived from hone.agents.environments.Environment")
    return found


ENVIRONMENTS: Registry[Factory] = Registry("environment", key="extra_info.environment.name", adopt=_adopt)
"""Environments by name: functions of their options."""


def _built_in(module: str, name: str) -> Factory:
    def make(**options: Any) -> Environment:
        import importlib

        return getattr(importlib.import_module(f"hone.agents.environments.{module}"), name)(**options)

    return make


for _name, _module, _class in (
    ("guess_the_number", "guess_the_number", "GuessTheNumber"),
    ("planning", "planning", "Planning"),
    ("gymnasium", "gymnasium", "Gymnasium"),
    ("reasoning_gym", "reasoning_gym", "ReasoningGym"),
    ("openenv", "openenv", "OpenEnv"),
):
    _ = ENVIRONMENTS.register(_name)(_built_in(_module, _class))


def make_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """A new environment.

    Raises:
        ConfigError: no such environment, or an option that it does not take.
    """
    factory = ENVIRONMENTS.get(name)
    try:
        return factory(**{key: value for key, value in options.items() if value is not None})
    except HoneError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"environment '{name}' cannot be made with {dict(options)}: {error}",
            where="extra_info.environment.options",
            fix="mend the options, see docs/agents.md",
        ) from error
