"""What an assistant turn says, and the messages of a conversation.

Messages are dicts in the form of OpenAI's chat API everywhere: ``role``, ``content``, and where they apply ``tool_calls``,
``tool_call_id``, ``name`` and ``reasoning_content``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from hone.errors import DataError

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


def is_parts(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether it is a content of several parts, in OpenAI's form: a list of objects that say their type."""
    return isinstance(value, list) and bool(value) and all(isinstance(p, dict) and "type" in p for p in value)


def text_of_parts(parts: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """The text of a content of several parts, with a note in the place of each that is no text, and the number of these.

    >>> text_of_parts([{"type": "text", "text": "a map:"}, {"type": "image_url", "image_url": {}}])
    ('a map:\\n(image_url left out: the model reads text only)', 1)
    """
    said = [part.get("text") for part in parts]
    notes = [f"({part['type']} left out: the model reads text only)" for part in parts]
    lines = [text if isinstance(text, str) else note for text, note in zip(said, notes, strict=True)]
    return "\n".join(lines), sum(not isinstance(text, str) for text in said)


def check_text(messages: Sequence[Message], who: str) -> None:
    """Make sure that messages hold text only.

    Raises:
        DataError: one has an image, or another part that is no text.
    """
    for message in messages:
        content = message.get("content")
        if is_parts(content) and (left_out := text_of_parts(content)[1]):
            kinds = sorted({str(part["type"]) for part in content if not isinstance(part.get("text"), str)})
            raise DataError(
                f"{who} has {left_out} parts that are no text ({', '.join(kinds)})",
                why="Hone trains language models without eyes or ears: the policy would be judged by what it was not shown",
                fix="say it in words, or leave these rows out",
                where="prompt",
            )


def tool_message(call: ToolCall, content: str) -> Message:
    """Return the message that answers ``call``."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name or "unknown", "content": content}
