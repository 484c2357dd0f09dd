"""Application of a tokenizer's chat template to conversations; contents cannot forge special tokens (:mod:`hone.data.chat`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import Message
from hone.agents.parsers.base import TOOL_PARSERS
from hone.data.chat import (
    Hidden,
    HiddenText,
    any_of,
    encode_hidden,
    left_out,
    named_tokens,
    render_with,
    special_pattern,
    special_tokens,
    template_of,
)
from hone.data.messages import as_mapping, with_arguments
from hone.data.proof import Missing
from hone.errors import DataError
from hone.text import check_valid, is_valid

log = logging.getLogger(__name__)


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
        self.special_text, self._named_text = special_pattern(tokenizer), any_of(named_tokens(tokenizer))

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
        hidden = Hidden(self.special_text, self._named_text)
        source = self._source_with_tools if tools else self.source
        settings = {"tools": hidden.tools(tools) if tools else None, "add_generation_prompt": ask, **self.kwargs}
        plain = [
            with_arguments({**message, "content": message.get("content") or ""}, as_mapping) for message in messages
        ]
        shown = [hidden.message(message) for message in plain]
        rendering = render_with(self.tokenizer, source, shown, settings, self.special_text, whole=False, hidden=hidden)
        if self.strict and rendering.missing is not None:
            self._refuse(rendering.missing, messages)
        return HiddenText(rendering.text, hidden.literals)

    def _refuse(self, missing: Missing, messages: Sequence[Message]) -> None:
        """Refuse what the template leaves out; of an assistant's message it is said once.

        Many templates leave out the words before a call, and agents send them again with every request.
        """
        said = missing.message is not None and messages[missing.message]["role"] == "assistant"
        problem = left_out(missing, messages, str(self.tokenizer.name_or_path))
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
        return encode_hidden(self.tokenizer, text)


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


# short conversations that probe the behaviour of a template ------------------------------------------------------------

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city."}},
            "required": ["city"],
        },
    },
}
"""Example of a tool."""

ASKED: Message = {"role": "user", "content": "How is the weather in Rome?"}
ANSWERED: Message = {"role": "assistant", "content": "It is sunny in Rome."}
ASKED_AGAIN: Message = {"role": "user", "content": "And tomorrow?"}


def call(number: int = 0, city: str = "Rome") -> dict[str, Any]:
    """Return one call of the tool, with an id in the form that Kimi K2 requires and others accept."""
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {"id": f"functions.get_weather:{number}", "type": "function", "function": function}


def calling(*calls: dict[str, Any], thoughts: str | None = None) -> Message:
    """Return an assistant turn that calls tools."""
    return thinking({"role": "assistant", "content": "", "tool_calls": list(calls)}, thoughts)


def thinking(message: Message, thoughts: str | None = "Let me think of it.") -> Message:
    return message if thoughts is None else {**message, "reasoning_content": thoughts}


def result(number: int = 0, text: str = "sunny") -> Message:
    return {
        "role": "tool",
        "tool_call_id": f"functions.get_weather:{number}",
        "name": "get_weather",
        "content": text,
    }


def probe_conversations() -> Iterator[tuple[list[Message], list[Message]]]:
    """Yield pairs of a conversation and the messages that follow it."""
    for thoughts in (None, "Let me think of it."):
        yield [ASKED, thinking(ANSWERED, thoughts)], [ASKED_AGAIN]
        yield [ASKED, calling(call(), thoughts=thoughts)], [result()]
        yield (
            [ASKED, calling(call(), thoughts=thoughts), result(), thinking(ANSWERED, thoughts)],
            [ASKED_AGAIN],
        )
        yield (
            [ASKED, calling(call(), thoughts=thoughts), result(), thinking(ANSWERED, thoughts)],
            [{"role": "user", "content": "Thank you."}],
        )


def shows_tools(template: Template) -> bool:
    """Return whether the template renders the tools that it receives."""
    try:
        return TOOL["function"]["name"] in template.text([ASKED], [TOOL]).text
    except DataError:
        return False


def written_call(template: Template) -> list[int] | None:
    """Return the tokens that the template writes for a turn with one call, or None without any."""
    try:
        prompt = template.text([ASKED], [TOOL]).text
        text = template.text([ASKED, calling(call())], [TOOL], ask=False)
    except DataError:
        return None
    if not text.text.startswith(prompt) or "Rome" not in text.text[len(prompt) :]:
        return None
    return template.encode(text[len(prompt) :])


def parser_that_reads(template: Template, likely: str) -> str:
    """Return the name of the parser that reads the template's calls, or ``likely`` if none does."""
    turn = written_call(template) or []
    expected = call()["function"]
    for name in (likely, *TOOL_PARSERS):
        calls = TOOL_PARSERS.get(name)(template.tokenizer).parse(turn, [TOOL]).calls
        if [(parsed.name, parsed.arguments) for parsed in calls] == [(expected["name"], expected["arguments"])]:
            return name
    return likely
