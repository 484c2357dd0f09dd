"""Reading assistant turns: the one interface of all tool-call formats, and what they share.

The marks of a format (``<tool_call>``, ``<|channel|>``) are tokens of their own in the vocabularies made for it. Such a mark is
recognised by its token id alone: text that only looks like it, written with ordinary tokens, is text. To that end a sampled turn
is first turned into one string in which each mark is a single character that no decoded text can contain (a lone surrogate);
the formats are read from that string. Where a vocabulary has no token for a mark, or text is given instead of ids, the mark is
looked for as text.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import AssistantTurn, ToolCall
from hone.data.chat import special_tokens
from hone.registry import Registry

TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "tool-call format", key="actor_rollout_ref.rollout.multi_turn.format"
)
"""Formats in which models write tool calls."""

Schemas = Mapping[str, Mapping[str, Any]]
"""Parameter schemas of tools by name."""


@dataclass(frozen=True)
class Found:
    """A call found in a turn, before it has an id; ``id`` is the one that the model wrote, if the format has them."""

    name: str
    arguments: dict[str, Any] | None
    raw: str
    error: str | None = None
    id: str | None = None


class Lexed:
    """Text with its marks as single characters.

    Args:
        text: the text.
        characters: of each mark that stands as a character; others stand as themselves.
    """

    def __init__(self, text: str, characters: Mapping[str, str] | None = None) -> None:
        self.text = text
        self._characters = dict(characters or {})
        self._literals = str.maketrans({character: mark for mark, character in self._characters.items()})

    def mark(self, literal: str) -> str:
        """Return how ``literal`` stands in the text."""
        return self._characters.get(literal, literal)

    def plain(self, text: str) -> str:
        """Return ``text`` with its marks written out."""
        return text.translate(self._literals)

    def replaced(self, text: str) -> Lexed:
        """Return another text with the same marks."""
        return Lexed(text, self._characters)


class ToolParser(ABC):
    """Reads one format of tool calls. Subclasses set ``marks`` and write :meth:`find`.

    Args:
        tokenizer: of the model; None reads text only.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    thoughts: ClassVar[tuple[str, str]] = ("<think>", "</think>")

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self._tokenizer = tokenizer
        known = named_tokens(tokenizer) if tokenizer is not None else {}
        marks = [mark for mark in dict.fromkeys((*self.thoughts, *self.marks)) if mark in known]
        self._characters = {mark: chr(0xD800 + number) for number, mark in enumerate(marks)}
        self._by_id = {known[mark]: character for mark, character in self._characters.items()}
        self._special = frozenset(special_tokens(tokenizer)) if tokenizer is not None else frozenset()

    def parse(
        self,
        output: str | Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        calls_before: int = 0,
        thinking: bool | None = None,
    ) -> AssistantTurn:
        """Take a sampled turn apart.

        Args:
            output: the sampled token ids, or their text.
            tools: OpenAI function schemas, by which untyped arguments get their types.
            calls_before: number of calls earlier in the conversation; the ids of this turn's go on from there.
            thinking: whether the turn begins within a block of thoughts that the prompt opened; None is not known: then it does
                when a block is closed that was not opened.
        """
        lexed = self._lex(output)
        reasoning, rest = self.split_thoughts(lexed, thinking)
        content, found = self.find(lexed.replaced(rest), schemas_of(tools))
        calls = tuple(
            ToolCall(
                found_call.id or f"call_{calls_before + index}",
                found_call.name,
                found_call.arguments,
                lexed.plain(found_call.raw).strip(),
                found_call.error,
            )
            for index, found_call in enumerate(found)
        )
        return AssistantTurn(lexed.plain(content).strip(), lexed.plain(reasoning or "").strip() or None, calls)

    @abstractmethod
    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[Found]]:
        """Return the content of a turn without its thoughts, and its calls."""

    def split_thoughts(self, turn: Lexed, thinking: bool | None) -> tuple[str | None, str]:
        """Return the thoughts of a turn, None where there are none, and the rest.

        A block that is not closed (a turn cut at its limit) is all thoughts. One that would open behind the first call is part
        of a call's arguments.
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
        if closed or thinking:
            return thoughts.removeprefix(opening), after
        return None, turn.text

    def _lex(self, output: str | Sequence[int]) -> Lexed:
        if isinstance(output, str):
            return Lexed(output)
        if self._tokenizer is None:
            raise ValueError("token ids can be read with a tokenizer only")
        pieces: list[str] = []
        run: list[int] = []
        for token in [*output, None]:
            if token is None or token in self._by_id or token in self._special:
                if run:
                    pieces.append(_decoded(self._tokenizer, run))
                    run = []
                if token is not None:
                    pieces.append(self._by_id.get(token, ""))
            else:
                run.append(token)
        return Lexed("".join(pieces), self._characters)


def named_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the tokens that a tokenizer recognises by their name, special or not, and their ids."""
    named: Any = tokenizer.added_tokens_encoder
    return dict(named)


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> Schemas:
    """Return the parameter schemas of OpenAI function schemas, by name."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {str(function.get("name")): function.get("parameters") or {} for function in functions}


def json_value(text: str) -> tuple[Any, str | None]:
    """Return the JSON value that ``text`` is, and what is wrong with it (then the value is None)."""
    try:
        return _STRICT.decode(text), None
    except json.JSONDecodeError as error:
        return None, f"not valid JSON: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:
        return None, f"not valid JSON: {error}"


def json_end(text: str) -> int | None:
    """Return where the JSON value at the beginning of ``text`` ends (white space before it aside), None where there is none."""
    start = len(text) - len(text.lstrip())
    try:
        return _STRICT.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def finite(text: str) -> float:
    """Return the number that ``text`` is.

    Raises:
        ValueError: it is too large for one.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large a number")
    return value


_STRICT = json.JSONDecoder(parse_constant=_no_constant, parse_float=finite)


def arguments_of(name: str, text: str, raw: str, *, id: str | None = None) -> Found:
    """Return the call of ``name`` whose arguments are the JSON object ``text``."""
    value, wrong = json_value(text)
    if wrong is None and not isinstance(value, dict):
        wrong = f"not a JSON object but {_kind(value)}"
    if wrong is None and not name:
        wrong = "without the name of a tool"
    if wrong is not None:
        return Found(name, None, raw, f"The arguments of the call are {wrong}.", id)
    return Found(name, value, raw, None, id)


def named_object(text: str, raw: str, keys: Sequence[str] = ("arguments", "parameters")) -> Found:
    """Return the call that the JSON object ``{"name": ..., "arguments": {...}}`` is.

    Args:
        text: the object.
        raw: what is kept as the text of the call.
        keys: names that the arguments may have; the first is the one that errors tell.
    """
    form = f'Write {{"name": <name of the tool>, "{keys[0]}": {{<arguments>}}}}.'
    value, wrong = json_value(text)
    if wrong is not None:
        return Found("", None, raw, f"The call is {wrong}. {form}")
    if not isinstance(value, dict):
        return Found("", None, raw, f"The call is not a JSON object but {_kind(value)}. {form}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return Found("", None, raw, f'The call has no "name". {form}')
    key = next((key for key in keys if key in value), None)
    if key is None:
        return Found(name, None, raw, f'The call has no "{keys[0]}". {form}')
    if not isinstance(value[key], dict):
        return Found(name, None, raw, f'"{key}" is not an object but {_kind(value[key])}. {form}')
    return Found(name, value[key], raw)


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")
