"""Turns in the harmony format of GPT-OSS: several messages on channels, calls among them."""

from __future__ import annotations

import re
from typing import NamedTuple

from hone.agents.parsers.base import TOOL_PARSERS, Found, Lexed, Schemas, ToolParser, arguments_of

_RECIPIENT = re.compile(r"\bto=(\S+)")


class _Part(NamedTuple):
    """One message of a turn: what stands before its body, the body, and the mark that ended it ("" for none)."""

    header: str
    body: str
    ending: str


@TOOL_PARSERS.register("harmony")
class HarmonyParser(ToolParser):
    """``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{...}<|call|>``.

    The channel ``analysis`` is thought, ``final`` is content, and so is ``commentary`` without a recipient. A message with a
    recipient is a call; the recipient may stand before or behind the channel's name.
    """

    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
    thoughts = ("<|channel|>analysis", "<|end|>")

    def split_thoughts(self, turn: Lexed, thinking: bool | None) -> tuple[str | None, str]:
        """Return what the analysis channel says, None where it says nothing, and the turn."""
        said = [part.body for part in _parts(turn) if _channel(turn, part) == "analysis" and not _recipient(part)]
        return "\n".join(said) if said else None, turn.text

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[Found]]:
        """Return what the channels for the user say, and the calls."""
        content, found = [], []
        for part in _parts(turn):
            recipient = _recipient(part)
            if recipient:
                found.append(_call(turn, part, recipient.removeprefix("functions.")))
            elif _channel(turn, part) != "analysis":
                content.append(part.body)
        return "\n".join(content), found


def _parts(turn: Lexed) -> list[_Part]:
    message, start = turn.mark("<|message|>"), turn.mark("<|start|>")
    endings = [turn.mark(mark) for mark in ("<|end|>", "<|return|>", "<|call|>")]
    pieces = re.split("(" + "|".join(re.escape(ending) for ending in endings) + ")", turn.text)
    parts = []
    for text, ending in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        header, begun, body = text.partition(message)
        if not begun:
            header, body = "", header.removeprefix(start)
        if header or body or begun:
            parts.append(_Part(header, body, turn.plain(ending)))
    return parts


def _channel(turn: Lexed, part: _Part) -> str:
    words = part.header.partition(turn.mark("<|channel|>"))[2].split()
    return words[0] if words else ""


def _recipient(part: _Part) -> str:
    header = re.sub("[\ud800-\udfff]", " ", part.header).replace("<|", " <|")
    match = _RECIPIENT.search(header)
    return match[1] if match else ""


def _call(turn: Lexed, part: _Part, name: str) -> Found:
    raw = turn.plain(part.header + turn.mark("<|message|>") + part.body) + part.ending
    if part.ending not in ("<|call|>", "<|end|>"):  # the latter by the first templates of the format
        return Found(name, None, raw, "The call is not ended by <|call|>.")
    return arguments_of(name, turn.plain(part.body).strip() or "{}", raw)
