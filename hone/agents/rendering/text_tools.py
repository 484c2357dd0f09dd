"""Tools, calls and results as plain text, for chat templates without tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hone.agents.messages import Message

_INTRODUCTION = """You may call functions. Their signatures:
<tools>
{schemas}
</tools>

For each call write a JSON object with the function's name and arguments between tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def conversation_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, system: bool, special: re.Pattern[str]
) -> list[Message]:
    """Return a conversation whose tools, calls and results are written into message contents.

    Args:
        messages: messages in OpenAI's form.
        tools: function schemas, written into the first message.
        special: names of special tokens, which schemas cannot forge: their first character is written as JSON's escape.
        system: True if the template accepts a system message; otherwise the first user message begins with the tools.
    """
    converted = messages_as_text(messages)
    if not tools:
        return converted
    schemas = "\n".join(
        special.sub(lambda name: f"\\u{ord(name[0][0]):04x}{name[0][1:]}", json.dumps(dict(tool), ensure_ascii=False))
        for tool in tools
    )
    introduction = _INTRODUCTION.format(schemas=schemas)
    first = converted[0] if converted else None
    if first is not None and (first["role"] == "system" or not system):
        if isinstance(first["content"], list):
            content: Any = [{"type": "text", "text": f"{introduction}\n\n"}, *first["content"]]
        elif first["role"] == "system":
            content = f"{first['content']}\n\n{introduction}"
        else:
            content = f"{introduction}\n\n{first['content']}"
        converted[0] = {**first, "content": content}
        return converted
    return [{"role": "system", "content": introduction}, *converted]


def messages_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write calls into message contents, and each run of results into one user message."""
    converted: list[Message] = []
    results: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message.get("content") or "")
            continue
        _append_results(converted, results)
        calls = message.get("tool_calls")
        if calls:
            text = "\n".join([*filter(None, [message.get("content")]), *map(_call_as_text, calls)])
            message = {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": text}
        converted.append(message)
    _append_results(converted, results)
    return converted


def _append_results(converted: list[Message], results: list[Any]) -> None:
    """Append the results, texts or parts, as one message of the user."""
    if results and all(isinstance(result, str) for result in results):
        text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
        converted.append({"role": "user", "content": text})
    elif results:
        parts: list[dict[str, Any]] = []
        for number, result in enumerate(results):
            content = [{"type": "text", "text": result}] if isinstance(result, str) else result
            opening = {"type": "text", "text": "\n" * (number > 0) + "<tool_response>\n"}
            parts += [opening, *content, {"type": "text", "text": "\n</tool_response>"}]
        converted.append({"role": "user", "content": parts})
    results.clear()


def _call_as_text(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, "arguments": {text}}}\n</tool_call>'
