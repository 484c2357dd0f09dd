"""Chat messages and parsed assistant turns.

Messages are always dicts in the form of OpenAI's chat API: ``role``, ``content`` and, where they apply, ``tool_calls``,
``tool_call_id``, ``name`` and ``reasoning_content``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from hone.data.images import IMAGE_PARTS
from hone.errors import DataError

Message = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """Tool call, as the model wrote it."""

    id: str  # unique within the conversation
    name: str  # name of the tool; empty if a malformed call has none
    arguments: dict[str, Any] | None  # arguments by name; None for a malformed call
    raw: str
    error: str | None = None  # error message for the model if the call is malformed, else None

    def as_openai(self) -> dict[str, Any]:
        """Return the entry of ``tool_calls``; arguments are JSON text, or the raw text of a malformed call."""
        arguments = self.raw if self.arguments is None else json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True)
class AssistantTurn:
    """Parsed assistant turn: content, reasoning and tool calls.

    Attributes:
        content: text without reasoning and calls, stripped.
        reasoning: text of the reasoning, or None.
        calls: tool calls in written order, malformed ones included.
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


def is_parts(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a content is a list of parts in OpenAI's form, each with a ``type``."""
    return isinstance(value, list) and bool(value) and all(isinstance(p, dict) and "type" in p for p in value)


def text_of_parts(parts: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """Return the text of multi-part content, with a note for each non-text part, and the number of notes.

    >>> text_of_parts([{"type": "text", "text": "a map:"}, {"type": "image_url", "image_url": {}}])
    ('a map:\\n(image_url left out: the model reads text only)', 1)
    """
    texts = [part.get("text") for part in parts]
    notes = [f"({part['type']} left out: the model reads text only)" for part in parts]
    lines = [text if isinstance(text, str) else note for text, note in zip(texts, notes, strict=True)]
    return "\n".join(lines), sum(not isinstance(text, str) for text in texts)


def check_read(messages: Sequence[Message], who: str, *, images: bool) -> None:
    """Check that messages contain only text, and images where ``images`` says that the model reads them.

    Raises:
        DataError: a message contains another part.
    """
    for message in messages:
        content = message.get("content")
        parts = content if is_parts(content) else ()
        others = [part for part in parts if not isinstance(part.get("text"), str)]
        left_out = [str(part["type"]) for part in others if not (images and part["type"] in IMAGE_PARTS)]
        if left_out:
            raise DataError(
                f"{who} has {len(left_out)} parts that the model does not read ({', '.join(sorted({*left_out}))})",
                why="the policy would be scored on input that it cannot see",
                fix="replace the parts by text, or remove these rows",
                where="prompt",
            )


def tool_message(call: ToolCall, content: str | list[dict[str, Any]]) -> Message:
    """Return the message that answers ``call``."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name or "unknown", "content": content}
