"""Base class of simulated users."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.agents.messages import Message
from hone.data.types import Sample


@dataclass(frozen=True)
class Reply:
    """Answer of the simulated user to a turn of the model.

    Attributes:
        content: text of the answer; None ends the conversation.
        reward: reward of the model's turn.
        done: True if the conversation is over.
        facts: named numbers, logged as means.
    """

    content: str | None
    reward: float = 0.0
    done: bool = False
    facts: dict[str, float] = field(default_factory=dict)


class Interaction(ABC):
    """Simulated user. One object serves all episodes; each episode has its ``state``.

    Args:
        config: ``config`` of the user's entry in the file.

    Attributes:
        name: name in the file; ``extra_info.interaction_kwargs.name`` of a row chooses one of several users.
    """

    name = ""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    async def start(self, sample: Sample, **kwargs: Any) -> Any:
        """Return the state of a new episode; ``kwargs`` are the row's ``interaction_kwargs``."""
        return sample

    @abstractmethod
    async def reply(self, state: Any, messages: Sequence[Message]) -> Reply:
        """Return the user's answer to a conversation whose last message is the model's."""

    async def finish(self, state: Any) -> None:  # noqa: B027 - most have nothing to do
        """Free the state of an episode, however it ended."""
