"""Deltas of a reply while it is sampled, limited to what can no longer change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hone.agents.messages import AssistantTurn, Message
from hone.agents.parsers.base import ToolParser
from hone.agents.serving.replies import TextStream

Delta = dict[str, Any]


class TurnStream:
    """Deltas of one reply in OpenAI's form: reasoning and text as they grow, and each call once it is complete.

    A call that is malformed at the end is text, so no part of a call is sent before its end.

    Args:
        parser: parser of the turn.
        stops: strings that end the text and are not part of it.
        has_tools: True if the reply may have calls.
        max_calls: maximum number of calls that the client receives; None sends all.
    """

    def __init__(
        self, parser: ToolParser, stops: Sequence[str], *, has_tools: bool, max_calls: int | None = None
    ) -> None:
        marks = (*parser.thoughts, *parser.marks)
        self._content, self._reasoning = TextStream(stops, marks), TextStream((), marks)
        self._parser, self._has_tools, self._max_calls = parser, has_tools, max_calls
        self._calls = 0

    def grow(self, turn: AssistantTurn) -> Iterator[Delta]:
        """Yield what is new and settled in a turn that is not complete.

        Text after a call is not settled: another call may follow, and formats differ in the text that they keep between calls.
        """
        yield from _texts("reasoning_content", self._reasoning.grow(turn.reasoning or ""))
        if not turn.calls and not self._may_become_calls(turn.content):
            yield from _texts("content", self._content.grow(turn.content))
        if self._parser.closes_calls:
            sound = next((place for place, call in enumerate(turn.calls) if call.error is not None), len(turn.calls))
            yield from self._call_deltas([call.as_openai() for call in turn.calls[:sound][: self._max_calls]])

    def end(self, message: Message) -> Iterator[Delta]:
        """Yield the rest of the complete reply."""
        yield from _texts("reasoning_content", self._reasoning.end(message.get("reasoning_content") or ""))
        yield from _texts("content", self._content.end(message.get("content") or ""))
        yield from self._call_deltas(message.get("tool_calls") or ())

    @property
    def content(self) -> str:
        """Text that the client has received."""
        return self._content.sent

    def _may_become_calls(self, content: str) -> bool:
        """Return whether text may turn out to be calls, in formats that write them without a mark."""
        return self._has_tools and not self._parser.closes_calls and content.lstrip()[:1] in ("{", "[")

    def _call_deltas(self, calls: Sequence[dict[str, Any]]) -> Iterator[Delta]:
        """Yield the calls that were not sent yet: id and name first, then the arguments."""
        for index in range(self._calls, len(calls)):
            function = calls[index]["function"]
            head = {**calls[index], "function": {"name": function["name"], "arguments": ""}}
            yield {"tool_calls": [{"index": index, **head}]}
            yield {"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]}
        self._calls = max(self._calls, len(calls))


def _texts(key: str, new: str) -> Iterator[Delta]:
    if new:
        yield {key: new}
