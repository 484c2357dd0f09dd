"""Parser of GPT-OSS's harmony format, in which a turn is several messages on channels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from hone.agents.parsers.base import TOOL_PARSERS, Lexed, ParsedCall, Schemas, ToolParser, arguments_of

_RECIPIENT = re.compile(r"\bto=(\S+)")


class _HarmonyMessage(NamedTuple):
    """Message of a turn: header, body, and the mark that ended it ("" for none)."""

    header: str
    body: str
    ending: str


@TOOL_PARSERS.register("harmony")
class HarmonyParser(ToolParser):
    """Parser of ``<|channel|>commentary to=functions.f<|message|>{...}<|call|>``, a message of a turn.

    The channel ``analysis`` is reasoning; ``final`` is content, and so is ``commentary`` without a recipient. A message with a
    recipient is a call; the recipient may be before or after the channel's name.
    """

    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
    thoughts = ("<|channel|>analysis", "<|end|>")

    def settled(self, output: Sequence[int]) -> list[int]:
        """Return the tokens of an unfinished turn without the header of a message that has no body yet."""
        body = self._characters.get("<|message|>")
        endings = {self._characters.get(mark) for mark in ("<|end|>", "<|return|>", "<|call|>")}
        for place in reversed(range(len(output))):
            character = self._by_id.get(output[place])
            if character is not None and character == body:
                return list(output)
            if character is not None and character in endings:
                return list(output[: place + 1])
        return []

    def split_thoughts(self, turn: Lexed, thinking: bool | None) -> tuple[str | None, str]:
        """Return the text of the analysis channel (None without any) and the turn."""
        thoughts = [
            message.body
            for message in _messages(turn)
            if _channel(turn, message) == "analysis" and not _recipient(message)
        ]
        return "\n".join(thoughts) if thoughts else None, turn.text

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        """Return the text of the channels for the user, and the calls."""
        content, calls = [], []
        for message in _messages(turn):
            recipient = _recipient(message)
            if recipient:
                calls.append(_call(turn, message, recipient.removeprefix("functions.")))
            elif _channel(turn, message) != "analysis":
                content.append(message.body)
        return "\n".join(content), calls


def _messages(turn: Lexed) -> list[_HarmonyMessage]:
    body_mark, start = turn.mark("<|message|>"), turn.mark("<|start|>")
    endings = [turn.mark(mark) for mark in ("<|end|>", "<|return|>", "<|call|>")]
    splits = re.split("(" + "|".join(re.escape(ending) for ending in endings) + ")", turn.text)
    messages = []
    for text, ending in zip(splits[::2], [*splits[1::2], ""], strict=True):
        header, begun, body = text.partition(body_mark)
        if not begun:
            header, body = "", header.removeprefix(start)
        if header or body or begun:
            messages.append(_HarmonyMessage(header, body, turn.plain(ending)))
    return messages


def _channel(turn: Lexed, message: _HarmonyMessage) -> str:
    words = message.header.partition(turn.mark("<|channel|>"))[2].split()
    return words[0] if words else ""


def _recipient(message: _HarmonyMessage) -> str:
    header = re.sub("[\ud800-\udfff]", " ", message.header).replace("<|", " <|")
    match = _RECIPIENT.search(header)
    return match[1] if match else ""


def _call(turn: Lexed, message: _HarmonyMessage, name: str) -> ParsedCall:
    raw = turn.plain(message.header + turn.mark("<|message|>") + message.body) + message.ending
    if message.ending not in ("<|call|>", "<|end|>"):  # <
        return ParsedCall(name, None, raw, "The call is not ended by <|call|>.")
    return arguments_of(name, turn.plain(message.body).strip() or "{}", raw)
