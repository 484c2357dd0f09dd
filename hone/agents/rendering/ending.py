"""The end of a rendered conversation: for a new reply, as it is, or inside its last turn."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from hone.agents.messages import Message
from hone.agents.rendering.template import HiddenText
from hone.errors import DataError

_MARK = "hone-end-of-prefix"


class Ending(Enum):
    """End of the prompt after the last message."""

    REPLY = "reply"  # the generation prompt, so that the model writes a new turn
    CLOSED = "closed"  # nothing; the last turn is complete
    OPEN = "open"  # the last message is an assistant's, and the prompt ends inside it, so that the model continues it


def marked(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Return the messages with a mark at the end of the last content, and the mark."""
    mark = _MARK
    while any(mark in str(message) for message in messages):
        mark += "."
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last.get('content') or ''}{mark}"}], mark


def cut_at(shown: HiddenText, mark: str, where: str) -> HiddenText:
    """Return a rendering up to the last occurrence of the mark.

    Raises:
        DataError: the template omits the mark, and so the message that it ends.
    """
    position = shown.text.rfind(mark)
    if position < 0:
        raise DataError(
            "the chat template omits the last assistant message",
            where=where,
            why="the model cannot continue a message that it does not see",
            fix="send continue_final_message=false, and the text as a user message",
        )
    return shown[:position]
