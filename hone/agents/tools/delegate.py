"""Tool through which the policy gives a task to a sub-agent: itself, in a conversation of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from hone.agents.tools.base import Tool, text_schema

NAME = "delegate"
SCHEMA = text_schema(
    NAME,
    "Give a task to an assistant with an empty conversation and the same tools; returns its answer.",
    "task",
    "the task, with all that is needed to solve it",
)


class Delegate(Tool):
    """Tool of one episode."""

    timeout = float("inf")  # the episode's limits bound a sub-agent
    retries = 0

    def __init__(self, play: Callable[[str], Awaitable[str]]) -> None:
        super().__init__(SCHEMA)
        self._play = play

    async def execute(self, state: Any, arguments: Mapping[str, Any], **kwargs: Any) -> str:
        return await self._play(arguments["task"])
