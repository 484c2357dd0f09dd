"""Parser of FunctionGemma's and Gemma 4's tool calls: JSON with bare keys, and strings between marks."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.parsers.base import TOOL_PARSERS, Lexed, ParsedCall, Schemas, ToolParser, finite, named_tokens
from hone.agents.parsers.sections import blocks

_CALL = re.compile(r"\s*call:(?P<name>[\w.\-]+)\s*(?=\{)")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_KEY = re.compile(r"[^:{}\[\],]+")
_WORDS = {"true": True, "false": False, "null": None, "None": None}
_MAX_DEPTH = 64


@TOOL_PARSERS.register("gemma")
class GemmaParser(ToolParser):
    """Parser of ``<|tool_call>call:f{x:1,text:<|"|>a<|"|>}<tool_call|>`` (Gemma 4); FunctionGemma has other marks.

    Reasoning is between ``<|channel>thought`` and ``<channel|>``.
    """

    marks = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
    thoughts = ("<|channel>", "<channel|>")
    _function_gemma = ("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if tokenizer is not None and self._function_gemma[0] in named_tokens(tokenizer):
            self.marks = self._function_gemma  # type: ignore[misc]
        super().__init__(tokenizer)

    def split_thoughts(self, turn: Lexed, thinking: bool | None) -> tuple[str | None, str]:
        """Return the reasoning without the channel's name (None without any) and the rest."""
        thoughts, rest = super().split_thoughts(turn, thinking)
        if thoughts is not None:
            thoughts = thoughts.removeprefix("thought").lstrip("\n") or None
        return thoughts, rest

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        """Return the text outside the calls, and the calls; the mark that requests their results is removed."""
        begin, end, quote, response = (turn.mark(mark) for mark in self.marks)
        text = turn.text.removesuffix(response)
        content, opened, rest = text.partition(begin)
        if not opened:
            return content, []
        calls = []
        for body, closed in blocks(opened + rest, begin, end):
            raw = turn.plain(begin + body + (end if closed else ""))
            if closed:
                calls.append(_call(body, quote, raw))
            else:
                calls.append(ParsedCall("", None, raw, f"The call is not closed by {self.marks[1]}."))
        after = rest.rpartition(end)[2] if end in rest else ""
        return content + after, calls


def _call(body: str, quote: str, raw: str) -> ParsedCall:
    match = _CALL.match(body)
    if match is None:
        return ParsedCall("", None, raw, "The call does not begin with call:NAME{.")
    reader = _Reader(body, match.end(), quote)
    try:
        arguments = reader.value()
        reader.expect_end()
    except _Unreadable as error:
        return ParsedCall(match["name"], None, raw, f"The arguments cannot be read: {error}.")
    return ParsedCall(match["name"], arguments, raw)


class _Unreadable(Exception):
    """Error with the position and reason of invalid notation."""


class _Reader:
    """Recursive-descent reader of the notation's values."""

    def __init__(self, text: str, position: int, quote: str) -> None:
        self._text, self._at, self._quote, self._depth = text, position, quote, 0

    def value(self) -> Any:
        self._skip()
        if self._take(self._quote):
            return self._string()
        if self._take("{"):
            return self._nested(self._object)
        if self._take("["):
            return self._nested(self._list)
        number = _NUMBER.match(self._text, self._at)
        if number:
            self._at = number.end()
            return self._number(number[0], whole=not (number[1] or number[2]))
        for word, value in _WORDS.items():
            if self._take(word):
                return value
        raise _Unreadable(f"a value is expected at character {self._at}")

    def expect_end(self) -> None:
        self._skip()
        if self._at != len(self._text):
            raise _Unreadable(f"text after the arguments, at character {self._at}")

    def _nested(self, read: Any) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _Unreadable(f"values are nested more than {_MAX_DEPTH} deep")
        value = read()
        self._depth -= 1
        return value

    def _object(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self._closes("}", first=not values):
            key = self._key()
            if key in values:
                raise _Unreadable(f"'{key}' is given twice")
            if not self._take(":"):
                raise _Unreadable(f"':' is expected after '{key}', at character {self._at}")
            values[key] = self.value()
        return values

    def _list(self) -> list[Any]:
        values: list[Any] = []
        while not self._closes("]", first=not values):
            values.append(self.value())
        return values

    def _closes(self, bracket: str, *, first: bool) -> bool:
        """Return whether the bracket closes here; otherwise consume the comma before the next value."""
        self._skip()
        if self._take(bracket):
            return True
        if not first and not self._take(","):
            raise _Unreadable(f"',' or '{bracket}' is expected at character {self._at}")
        return False

    def _number(self, text: str, *, whole: bool) -> int | float:
        try:
            return int(text) if whole else finite(text)
        except ValueError as error:  # too long or too large
            raise _Unreadable(f"{text[:40]} is not a number") from error

    def _key(self) -> str:
        self._skip()
        if self._take(self._quote):
            return self._string()
        match = _KEY.match(self._text, self._at)
        if match is None:
            raise _Unreadable(f"a key is expected at character {self._at}")
        self._at = match.end()
        return match[0].strip()

    def _string(self) -> str:
        end = self._text.find(self._quote, self._at)
        if end < 0:
            raise _Unreadable(f"the string at character {self._at} is not closed")
        text, self._at = self._text[self._at : end], end + len(self._quote)
        return text

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _skip(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
