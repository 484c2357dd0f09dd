"""What an assistant turn says, and the messages of a conversation.

Messages are dicts in the form of OpenAI's chat API everywhere: ``role``, ``content``, and where they apply ``tool_calls``,
``tool_call_id``, ``name`` and ``reasoning_content``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as the model wrote it.

    Attributes:
        id: unique within the conversation.
        name: of the tool; empty where the call is so malformed that it has none.
        arguments: by name; None where the call is malformed.
        raw: the text of the call.
        error: what is wrong with the call, in words that a tool message can give back to the model; None for a well-formed one.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str
    error: str | None = None

    def as_openai(self) -> dict[str, Any]:
        """Return the entry of ``tool_calls``; arguments are JSON text, those of a malformed call its own text."""
        arguments = self.raw if self.arguments is None else json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True)
class AssistantTurn:
    """What one assistant turn says, taken apart.

    Attributes:
        content: its text without thoughts and calls, white space around it removed.
        reasoning: its thoughts, None where it has none.
        calls: in the order in which they were written, malformed ones too.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()

    def message(self) -> Message:
        """Return the turn as a message of the conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_openai() for call in self.calls]
        return message


def tool_message(call: ToolCall, content: str) -> Message:
    """Return the message that answers ``call``."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name or "unknown", "content": content}
