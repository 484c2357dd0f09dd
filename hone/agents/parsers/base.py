"""Base class of tool-call parsers, and helpers that they share.

The marks of a format (``<tool_call>``, ``<|channel|>``) are single tokens in vocabularies made for it. Such a mark is recognised by
its token id alone: text that only looks like it, written with ordinary tokens, is text. Therefore a sampled turn is first converted
into a string in which each mark is one character that no decoded text can contain (a lone surrogate); parsers read that string. If
the vocabulary has no token for a mark, or the input is text, the mark is searched as text.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import AssistantTurn, ToolCall
from hone.data.chat import named_tokens, special_tokens
from hone.registry import Registry
from hone.text import is_valid, valid_text

TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "tool-call format", key="actor_rollout_ref.rollout.multi_turn.format"
)
"""Formats in which models write tool calls."""

Schemas = Mapping[str, Mapping[str, Any]]
"""Parameter schemas of tools by name."""

MAX_NESTING = 64
"""Deepest nesting of a call's arguments; schemas, templates and logs walk through them recursively."""


@dataclass(frozen=True)
class ParsedCall:
    """Parsed tool call before an id is assigned; ``id`` is the id that the model wrote, if the format has ids."""

    name: str
    arguments: dict[str, Any] | None
    raw: str
    error: str | None = None
    id: str | None = None


class Lexed:
    """Text in which each mark in ``characters`` is a single character; other marks are literal text.

    Args:
        characters: character of each mark that has one; other marks are literal text.
    """

    def __init__(self, text: str, characters: Mapping[str, str] | None = None) -> None:
        self.text = text
        self._characters = dict(characters or {})
        self._literals = str.maketrans({character: mark for mark, character in self._characters.items()})

    def mark(self, literal: str) -> str:
        """Return the form of the mark ``literal`` in the text."""
        return self._characters.get(literal, literal)

    def plain(self, text: str) -> str:
        """Return ``text`` with its marks written out."""
        return text.translate(self._literals)

    def replaced(self, text: str) -> Lexed:
        return Lexed(text, self._characters)


class ToolParser(ABC):
    """Parser of one tool-call format. Subclasses set ``marks`` and implement :meth:`find`."""

    marks: ClassVar[tuple[str, ...]] = ()
    thoughts: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    closes_calls: ClassVar[bool] = True
    """True if a call without an error stays as it is, whatever text follows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self._tokenizer = tokenizer
        token_ids = named_tokens(tokenizer) if tokenizer is not None else {}
        marks = [mark for mark in dict.fromkeys((*self.thoughts, *self.marks)) if mark in token_ids]
        self._characters = {mark: chr(0xD800 + number) for number, mark in enumerate(marks)}
        self._by_id = {token_ids[mark]: character for mark, character in self._characters.items()}
        self._special = frozenset(special_tokens(tokenizer)) if tokenizer is not None else frozenset()

    def parse(
        self,
        output: str | Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        calls_before: int = 0,
        thinking: bool | None = None,
    ) -> AssistantTurn:
        """Parse a sampled turn, its token ids or their text.

        Args:
            tools: OpenAI function schemas, used to convert untyped arguments.
            calls_before: number of calls earlier in the conversation; the ids of this turn's calls continue from there.
            thinking: whether the prompt opened a reasoning block. None: it did if a block is closed that was not opened.
        """
        lexed = self._lex(output)
        reasoning, rest = self.split_thoughts(lexed, thinking)
        try:
            content, parsed = self.find(lexed.replaced(rest), schemas_of(tools))
        except RecursionError:
            content, parsed = "", [ParsedCall("", None, rest, "The call is nested too deeply to be read.")]

        def plain(text: str) -> str:
            return valid_text(lexed.plain(text)).strip()

        calls = tuple(
            _usable(
                ToolCall(
                    valid_text(call.id or f"call_{calls_before + index}"),
                    call.name,
                    call.arguments,
                    plain(call.raw),
                    call.error,
                )
            )
            for index, call in enumerate(parsed)
        )
        return AssistantTurn(plain(content), plain(reasoning or "") or None, calls)

    def settled(self, output: Sequence[int]) -> list[int]:
        """Return the tokens of an unfinished turn without those whose meaning the next tokens decide."""
        return list(output)

    @abstractmethod
    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        """Return the content of a turn without its reasoning, and its calls."""

    def split_thoughts(self, turn: Lexed, thinking: bool | None) -> tuple[str | None, str]:
        """Return the reasoning of a turn (None without any) and the rest.

        An unclosed block (a truncated turn) is all reasoning. A block that would open after the first call is part of a call's
        arguments; so is one that would end within the first call, unless the reasoning is known to be open.
        """
        opening, closing = (turn.mark(mark) for mark in self.thoughts)
        opened_at = turn.text.find(opening)
        first_call = min((at for at in (turn.text.find(turn.mark(mark)) for mark in self.marks) if at >= 0), default=-1)
        if not thinking and opened_at >= 0 and (first_call < 0 or opened_at < first_call):
            thoughts, _, after = turn.text[opened_at + len(opening) :].partition(closing)
            return thoughts, turn.text[:opened_at] + after
        if thinking is False:
            return None, turn.text
        thoughts, closed, after = turn.text.partition(closing)
        if thinking is None and closed and 0 <= first_call < len(thoughts):
            _, calls = self.find(turn, {})
            if any(call.error is None and closing in call.raw for call in calls):
                return None, turn.text  # no reasoning: the mark is in an argument
        if closed or thinking:
            return thoughts.removeprefix(opening), after
        return None, turn.text

    def _lex(self, output: str | Sequence[int]) -> Lexed:
        if isinstance(output, str):
            return Lexed(output)
        if self._tokenizer is None:
            raise ValueError("parsing token ids needs a tokenizer")
        chunks: list[str] = []
        run: list[int] = []
        for token in [*output, None]:
            if token is None or token in self._by_id or token in self._special:
                if run:
                    chunks.append(_decoded(self._tokenizer, run))
                    run = []
                if token is not None:
                    chunks.append(self._by_id.get(token, ""))
            else:
                run.append(token)
        return Lexed("".join(chunks), self._characters)


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _usable(call: ToolCall) -> ToolCall:
    """Return the call, malformed if its text is invalid or its arguments cannot be used: nested too deeply, no JSON form."""
    error = call.error
    if not is_valid([call.name, call.arguments]):
        error = "The call has an escape such as \\ud800, half of a surrogate pair, which is not a character."
    elif _nesting(call.arguments) > MAX_NESTING:
        error = f"The arguments of the call are nested more than {MAX_NESTING} levels deep."
    else:
        try:
            json.dumps(call.arguments)
        except ValueError as problem:  # an integer with more digits than Python writes
            error = f"The arguments of the call have no JSON form: {problem}."
    if error is None:
        return call
    return replace(call, name=valid_text(call.name), arguments=None, error=valid_text(error))


def _nesting(value: Any) -> int:
    levels, level = 0, [value]
    while level := [entry for entry in level if isinstance(entry, dict | list)]:
        levels += 1
        level = [item for entry in level for item in (entry.values() if isinstance(entry, dict) else entry)]
    return levels


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> Schemas:
    """Return the parameter schemas of OpenAI function schemas, by name."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {str(function.get("name")): function.get("parameters") or {} for function in functions}


def json_value(text: str) -> tuple[Any, str | None]:
    try:
        return _STRICT.decode(text), None
    except json.JSONDecodeError as error:
        return None, f"not valid JSON: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:
        return None, f"not valid JSON: {error}"


def json_end(text: str) -> int | None:
    """Return the end index of the JSON value at the start of ``text`` after white space, or None."""
    start = len(text) - len(text.lstrip())
    try:
        return _STRICT.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def finite(text: str) -> float:
    """Parse a number; ValueError if it is too large."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large a number")
    return value


_STRICT = json.JSONDecoder(parse_constant=_no_constant, parse_float=finite)


def arguments_of(name: str, text: str, raw: str, *, id: str | None = None) -> ParsedCall:
    """Return a call of ``name`` whose arguments are the JSON object ``text``."""
    value, problem = json_value(text)
    if problem is None and not isinstance(value, dict):
        problem = f"not a JSON object but {_kind(value)}"
    if problem is None and not name:
        problem = "without the name of a tool"
    if problem is not None:
        return ParsedCall(name, None, raw, f"The arguments of the call are {problem}.", id)
    return ParsedCall(name, value, raw, None, id)


def named_object(text: str, raw: str, keys: Sequence[str] = ("arguments", "parameters")) -> ParsedCall:
    """Parse a call written as ``{"name": ..., "arguments": {...}}``; ``keys`` are those accepted for the arguments, errors name the first."""
    form = f'Write {{"name": <name of the tool>, "{keys[0]}": {{<arguments>}}}}.'
    value, problem = json_value(text)
    if problem is not None:
        return ParsedCall("", None, raw, f"The call is {problem}. {form}")
    if not isinstance(value, dict):
        return ParsedCall("", None, raw, f"The call is not a JSON object but {_kind(value)}. {form}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ParsedCall("", None, raw, f'The call has no "name". {form}')
    key = next((key for key in keys if key in value), None)
    if key is None:
        return ParsedCall(name, None, raw, f'The call has no "{keys[0]}". {form}')
    if not isinstance(value[key], dict):
        return ParsedCall(name, None, raw, f'"{key}" is not an object but {_kind(value[key])}. {form}')
    return ParsedCall(name, value[key], raw)


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")
