"""What a tool is: a schema that the model is shown, and a life cycle within an episode."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.agents.messages import is_parts, text_of_parts

Schema = dict[str, Any]


class ToolError(Exception):
    """A call that cannot be answered, and would not be on another try: its text goes to the model (division by zero)."""


@dataclass
class ToolResult:
    """What a call gives.

    Attributes:
        text: what the model reads.
        reward: added to the reward of the turn that made the call.
        metrics: numbers, logged as ``tool/<tool>/<name>``.
        left_out: parts that are no text (images), in whose place the text has a note.
    """

    text: str
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    left_out: int = 0

    @classmethod
    def of(cls, value: Any) -> ToolResult:
        """Whatever a tool returned: a text, parts in OpenAI's form, anything that is JSON, or (value, reward[, metrics]).

        >>> ToolResult.of(("7", 0.5))
        ToolResult(text='7', reward=0.5, metrics={}, left_out=0)

        Raises:
            TypeError: it is none of these.
        """
        if isinstance(value, ToolResult):
            return value
        if isinstance(value, tuple):
            if len(value) not in (2, 3):
                raise TypeError(
                    f"a tool returns a value, (value, reward) or (value, reward, metrics), not {len(value)} values"
                )
            result = cls.of(value[0])
            return cls(result.text, float(value[1]), dict(value[2]) if len(value) == 3 else {}, result.left_out)
        if is_parts(value):
            text, left_out = text_of_parts(value)
            return cls(text, left_out=left_out)
        return cls(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


class Tool(ABC):
    """A tool of a run. One object serves all episodes; what belongs to one episode is its ``state``.

        create -> execute, execute, ... -> calc_reward -> release

    An episode's state is created at its first call, and released when the episode is over, however it ended.
    ``extra_info.tools_kwargs.<name>`` of a dataset row gives each of the four further arguments: ``create_kwargs``,
    ``execute_kwargs``, ``calc_reward_kwargs`` and ``release_kwargs``.

    An ``execute`` that never really waits runs in the order of the calls, so that a run repeats bit for bit; what blocks (files,
    computation) belongs into a thread or a process.

    Args:
        schema: OpenAI function schema.

    Attributes:
        name: of the function.
        timeout: seconds for one call; None means ``multi_turn.tool_timeout``.
        retries: tries after the first; None means ``multi_turn.tool_retries``.
        concurrency: most calls at a time; None means ``multi_turn.tool_concurrency``.
    """

    timeout: float | None = None
    retries: int | None = None
    concurrency: int | None = None

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.name: str = schema["function"]["name"]

    async def create(self, **kwargs: Any) -> Any:
        """The state of an episode."""
        return None

    @abstractmethod
    async def execute(self, state: Any, arguments: Mapping[str, Any], **kwargs: Any) -> Any:
        """Answer one call: a text, anything that is JSON, a :class:`ToolResult`, or (value, reward[, metrics]).

        Args:
            state: of the episode.
            arguments: as the model gave them; they fit the schema.
            kwargs: ``execute_kwargs`` of the row.

        Raises:
            ToolError: it cannot be answered; the model reads why. Any other exception is tried again.
        """

    async def calc_reward(self, state: Any, **kwargs: Any) -> float | None:
        """What the episode earned with this tool, None for nothing to say."""
        return None

    async def release(self, state: Any, **kwargs: Any) -> None:  # noqa: B027 - most have nothing to do
        """The episode is over."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """The run is over."""
