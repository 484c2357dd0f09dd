"""What a simulated user is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.agents.messages import Message
from hone.data.types import Sample


@dataclass(frozen=True)
class Reply:
    """What the user says to a turn of the model.

    Attributes:
        content: their words; None when there is nothing more to say.
        reward: of the model's turn.
        done: whether the conversation is over.
        facts: named numbers, logged as means.
    """

    content: str | None
    reward: float = 0.0
    done: bool = False
    facts: dict[str, float] = field(default_factory=dict)


class Interaction(ABC):
    """A simulated user. One object serves all episodes; what belongs to one episode is its ``state``.

    Args:
        config: of the file.

    Attributes:
        name: in the file; ``extra_info.interaction_kwargs.name`` of a row chooses it where there are several.
    """

    name = ""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    async def start(self, sample: Sample, **kwargs: Any) -> Any:
        """The state of an episode; ``kwargs`` are the row's ``interaction_kwargs``."""
        return sample

    @abstractmethod
    async def reply(self, state: Any, messages: Sequence[Message]) -> Reply:
        """What the user says to the conversation, whose last message is the model's."""

    async def finish(self, state: Any) -> None:  # noqa: B027 - most have nothing to do
        """The episode is over, however it ended."""
