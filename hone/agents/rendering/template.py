"""Application of a tokenizer's chat template such that message contents cannot forge special tokens.

A template inserts contents into text that is full of special tokens, and the tokenizer converts every ``<|im_end|>`` into the token,
regardless of its author. Here text in contents that looks like a special token is hidden while the template runs, and is encoded as
ordinary text. In call arguments and tool results this includes every other named token (``<tool_call>``). Without such text, the
tokens are exactly those of ``apply_chat_template``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import Message
from hone.agents.parsers.base import named_tokens
from hone.data.chat import left_out, render_with, special_tokens, template_of
from hone.data.messages import as_mapping, with_arguments
from hone.data.proof import Missing
from hone.errors import DataError
from hone.text import check_valid, is_valid

log = logging.getLogger(__name__)

_TRUSTED = ("system", "developer")
"""Roles whose contents may contain special tokens, since the operator of the model writes them."""


class Template:
    """Chat template of a tokenizer.

    Args:
        tokenizer: tokenizer with a chat template.
    Attributes:
        strict: True to refuse a conversation whose tools, or texts of others than the assistant, the template leaves out.

    Raises:
        DataError: the tokenizer has no chat template, or it exceeds a limit of time or memory.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.kwargs, self.strict = tokenizer, dict(kwargs or {}), False
        self._told: set[str] = set()
        self.source, self._source_with_tools = template_of(tokenizer), template_of(tokenizer, tools=True)
        self.special = special_tokens(tokenizer)
        self.special_text = _any_of(str(tokenizer.convert_ids_to_tokens(index)) for index in self.special)
        self._named_text = _any_of(named_tokens(tokenizer))

    def text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, ask: bool = True
    ) -> HiddenText:
        """Render a conversation, with ``ask`` up to the generation prompt.

        Raises:
            DataError: the template refuses the messages, or their text is invalid.
        """
        check_valid({"messages": list(messages), "tools": list(tools or ())}, str(self.tokenizer.name_or_path))
        try:
            return self._rendered(messages, tools, ask)
        except DataError as error:
            if error.__cause__ is None:
                raise  # the template exceeds a limit
            simple = [_simplified(message) for message in messages]
            if simple != list(messages):
                return self.text(simple, tools, ask=ask)
            raise DataError(
                f"the chat template refuses the conversation ({', '.join(m['role'] for m in messages)}): {error.__cause__}",
                where=str(self.tokenizer.name_or_path),
                why="the model cannot receive a conversation that its template refuses",
                fix="check the roles and their order, use another template with actor_rollout_ref.model.custom_chat_template, "
                "or show tools as text with actor_rollout_ref.rollout.multi_turn.renderer=text_tools",
            ) from error

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, ask: bool
    ) -> HiddenText:
        hidden = _Hidden(self.special_text, self._named_text)
        source = self._source_with_tools if tools else self.source
        settings = {"tools": hidden.tools(tools) if tools else None, "add_generation_prompt": ask, **self.kwargs}
        plain = [
            with_arguments({**message, "content": message.get("content") or ""}, as_mapping) for message in messages
        ]
        shown = [hidden.message(message) for message in plain]
        rendering = render_with(self.tokenizer, source, shown, settings, self.special_text, whole=False)
        if self.strict and rendering.missing is not None:
            self._refuse(rendering.missing, messages, hidden)
        return HiddenText(rendering.text, hidden.literals)

    def _refuse(self, missing: Missing, messages: Sequence[Message], hidden: _Hidden) -> None:
        """Refuse what the template leaves out; of an assistant's message it is said once.

        Many templates leave out the words before a call, and agents send them again with every request.
        """
        said = missing.message is not None and messages[missing.message]["role"] == "assistant"
        plain = dataclasses.replace(missing, text=str(HiddenText(missing.text, hidden.literals)))
        problem = left_out(plain, messages, str(self.tokenizer.name_or_path))
        if missing.message is None:
            fix = "show tools as text with actor_rollout_ref.rollout.multi_turn.renderer=text_tools, or use another template"
            raise DataError(problem.what, where=problem.where, why=problem.why, fix=fix, code=problem.code)
        if not said:
            raise problem
        if missing.what not in self._told:
            self._told.add(missing.what)
            log.warning("%s", problem.what)

    def encode(self, text: HiddenText) -> list[int]:
        """Return the token ids of a rendering, hidden text as ordinary tokens."""
        ids: list[int] = []
        for span in text.spans():
            literal = text.hidden.get(span)
            if literal is None:
                ids += self._encoded(span)
            else:
                ids += self._spelled(literal)
        return ids

    def _spelled(self, literal: str) -> list[int]:
        """Return ordinary tokens for a text that equals a token's name."""
        ids = self._encoded(literal, split_special_tokens=True)
        if self.tokenizer.convert_tokens_to_ids(literal) not in ids:
            return ids
        return [*self._encoded(literal[:1]), *self._encoded(literal[1:])]  # a named token that is not special

    def _encoded(self, text: str, **options: Any) -> list[int]:
        encoded: Any = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, **options)
        return list(encoded["input_ids"])


class HiddenText:
    """Rendering in which each character of ``hidden`` stands for ordinary text."""

    def __init__(self, text: str, hidden: Mapping[str, str]) -> None:
        self.text, self.hidden = text, hidden

    def __str__(self) -> str:
        return self.text.translate(str.maketrans(dict(self.hidden)))

    def spans(self) -> list[str]:
        """Split the text at its placeholders, which become separate strings."""
        if not self.hidden:
            return [self.text] if self.text else []
        return [span for span in re.split(f"([{''.join(self.hidden)}])", self.text) if span]

    def __getitem__(self, where: slice) -> HiddenText:
        return HiddenText(self.text[where], self.hidden)


class _Hidden:
    """Replacement of text that looks like a named token by a character that no text can contain (a lone surrogate)."""

    def __init__(self, special: re.Pattern[str], named: re.Pattern[str]) -> None:
        self._special, self._named = special, named
        self.literals: dict[str, str] = {}
        self._characters: dict[str, str] = {}

    def message(self, message: Message) -> Message:
        """Return the message with such text replaced, unless its role may contain special tokens."""
        role = message.get("role")
        if role in _TRUSTED:
            return message
        strict = {"tool_calls", "content"} if role == "tool" else {"tool_calls"}
        return {
            key: self._value(value, self._named if key in strict else self._special) for key, value in message.items()
        }

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return function schemas with such text replaced: servers of others write them."""
        return [self._value(tool, self._named) for tool in tools]

    def _value(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: self._character(match[0]), value)
        if isinstance(value, Mapping):
            return {self._value(key, pattern): self._value(item, pattern) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(item, pattern) for item in value]
        return value

    def _character(self, literal: str) -> str:
        if literal not in self._characters:
            character = chr(0xD800 + len(self._characters))
            self._characters[literal], self.literals[character] = character, literal
        return self._characters[literal]


def _simplified(message: Message) -> Message:
    """Return the message for strict templates: mapping arguments, and reasoning or content but not both."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        value = _loaded(call["function"]["arguments"])
        if isinstance(value, str):  # a malformed call
            call = {**call, "function": {**call["function"], "arguments": {}}}
        calls.append(call)
    simple = {**message, "tool_calls": calls}
    if message.get("content") and message.get("reasoning_content"):
        simple |= {"reasoning_content": f"{message['reasoning_content']}\n{message['content']}", "content": ""}
    return simple


def _any_of(literals: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or r"(?!)")


def _loaded(text: Any) -> Any:
    """Parse JSON text to a mapping of valid text; other text (a malformed call) stays text."""
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and is_valid(value) else text


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
