"""Short conversations that probe the behaviour of a template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.agents.messages import Message
from hone.agents.parsers.base import TOOL_PARSERS
from hone.agents.rendering.template import Template
from hone.errors import DataError

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
