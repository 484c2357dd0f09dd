"""Events of a streamed message, in Anthropic's order.

message_start, ping
  content_block_start                  (thinking, text or tool_use)
    content_block_delta ...            (thinking_delta, text_delta or input_json_delta)
    content_block_delta                (signature_delta, at the end of thinking)
  content_block_stop
message_delta, message_stop
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.agents.serving.messages.blocks import tool_use

Event = dict[str, Any]


class EventSequence:
    """Events of the blocks of one message.

    Args:
        signature: signature of its thinking.
        omits_thinking: True to leave the text of thinking out.
    """

    def __init__(self, signature: str, *, omits_thinking: bool) -> None:
        self._signature, self._omits_thinking = signature, omits_thinking
        self._open: str | None = None
        self._count = 0

    def thinking(self, delta: str) -> Iterator[Event]:
        """Yield the events of more reasoning."""
        yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        if not self._omits_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": delta})

    def text(self, delta: str) -> Iterator[Event]:
        """Yield the events of more text."""
        yield from self._begin("text", {"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": delta})

    def call(self, call: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a part of a tool call in the form of chat; the first part has its id."""
        if "id" in call:
            yield from self.end()
            yield from self._begin("tool_use", tool_use(call, {}))
        arguments = call["function"].get("arguments")
        if arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def end(self) -> Iterator[Event]:
        """Yield the events that end the unfinished block, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        self._open = None
        yield {"type": "content_block_stop", "index": self._count - 1}

    def finish(self) -> Iterator[Event]:
        """Yield the events that end the last block; a reply without any block has an empty text."""
        if not self._count:
            yield from self._begin("text", {"type": "text", "text": ""})
        yield from self.end()

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self.end()
        self._open, self._count = kind, self._count + 1
        yield {"type": "content_block_start", "index": self._count - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._count - 1, "delta": delta}
