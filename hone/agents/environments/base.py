"""Base class of environments, which show an observation, take a policy turn and return a reward."""

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
    """Result of one policy turn in an environment.

    Attributes:
        messages: the environment's answer; ignored when ``done``.
        reward: reward of the turn.
        done: True if the episode is over.
        facts: named numbers, logged as means over episodes; ``solved`` is 1 for a solved task.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    facts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def says(cls, text: str, **rest: Any) -> Step:
        """Return a step that answers with one user message."""
        return cls([{"role": "user", "content": text}], **rest)


class Environment(ABC):
    """Environment of one episode.

    >>> class Echo(Environment):
    ...     async def reset(self, seed):
    ...         return [{"role": "user", "content": "Say hello."}]
    ...
    ...     async def step(self, turn):
    ...         return Step(reward=float("hello" in turn.content.lower()), done=True)

    Attributes:
        tools: schemas of the functions it offers. Calls arrive in ``turn.calls``; each must be answered by a tool message.
    """

    tools: tuple[dict[str, Any], ...] = ()
    hosted = False
    """True if it runs in another Python, whose path is its argument ``python``."""

    @abstractmethod
    async def reset(self, seed: int) -> list[Message]:
        """Begin an episode; the returned messages depend only on ``seed`` and the options."""

    @abstractmethod
    async def step(self, turn: AssistantTurn) -> Step:
        """Process one turn of the policy."""

    async def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Free resources at the end of the episode."""


Factory = Callable[..., Environment]


def _adopt(factory: Any, path: str) -> Factory:
    if not (inspect.isclass(factory) and issubclass(factory, Environment)):
        raise TypeError("it should be a class derived from hone.agents.environments.Environment")
    return factory


ENVIRONMENTS: Registry[Factory] = Registry("environment", key="extra_info.environment.name", adopt=_adopt)
"""Environment factories by name; each takes the options as keyword arguments."""


for _name, _class in (
    ("guess_the_number", "GuessTheNumber"),
    ("planning", "Planning"),
    ("gymnasium", "Gymnasium"),
    ("reasoning_gym", "ReasoningGym"),
    ("openenv", "OpenEnv"),
    ("tic_tac_toe", "TicTacToe"),
    ("kuhn_poker", "KuhnPoker"),
    ("harbor", "Harbor"),
):
    ENVIRONMENTS.register_later(f"hone.agents.environments.{_name}:{_class}", _name)
ENVIRONMENTS.register_later("hone.agents.environments.proposals:Sums", "sums")
ENVIRONMENTS.register_later("hone.agents.environments.hosted:TextArena", "textarena")
ENVIRONMENTS.register_later("hone.agents.environments.hosted:Gem", "gem")


def make_environment(name: str, options: Mapping[str, Any], pythons: Mapping[str, str] | None = None) -> Environment:
    """Return a new environment.

    ``pythons`` has the Python of those that run in another one, by name. Options come from data, so they cannot name it.

    Raises:
        ConfigError: the name is unknown, or an option is invalid.
    """
    factory = ENVIRONMENTS.get(name)
    arguments = {key: value for key, value in options.items() if value is not None}
    try:
        if getattr(factory, "hosted", False):
            if "python" in arguments:
                raise TypeError("the option 'python' is set by actor_rollout_ref.rollout.agent.environment_python")
            arguments["python"] = (pythons or {}).get(name)
        return factory(**arguments)
    except HoneError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"environment '{name}' cannot be made with {dict(options)}: {error}",
            where="extra_info.environment.options",
            fix="correct the options, see docs/agents.md",
        ) from error
