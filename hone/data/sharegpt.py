"""Conversations in ShareGPT's form, ``{"from": "human", "value": ...}``, as chat messages.

Both `hone data convert` and the datasets of a run convert by this module.
"""

from __future__ import annotations

import json
from typing import Any

from hone.data.messages import PARTS
from hone.errors import DataError

Messages = list[dict[str, Any]]

ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
    "function": "tool",
}
"""Chat role of each name that published datasets use."""
COLUMNS = {"messages": ("conversations", "conversation")}  # columns that are read in place of one that a file lacks
SYSTEM = "system"  # column of a system message, next to the conversation


def is_sharegpt(value: Any) -> bool:
    """Return whether a value is a list of ShareGPT's turns."""
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], dict)
        and value[0].get("from") is not None
        and value[0].get("role") is None
    )


def unknown_turn(turns: list[Any]) -> int | None:
    return next((number for number, turn in enumerate(turns) if _role(turn) is None), None)


def messages_of_turns(turns: list[Any], system: Any) -> Messages:
    """Return the chat messages of turns with known roles, after the system message if there is one. Raises ValueError:
    a turn has no text, or a turn ``function_call`` no call.
    """
    messages: Messages = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    for turn in turns:
        content = turn.get("content")
        content = turn.get("value") if content is None else content
        message = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
        message["role"] = _role(turn)
        if str(turn.get("from")).lower() == "function_call":
            message |= {"content": "", "tool_calls": _calls(content, len(messages))}
        elif message["role"] == "tool" and (isinstance(content, dict) or _is_data(content)):
            message["content"] = json.dumps(content, ensure_ascii=False)
        elif isinstance(content, list):
            message["content"] = "".join(_text(part) for part in content)
        elif isinstance(content, str) or (content is None and message.get("tool_calls")):
            message["content"] = content or ""
        else:
            raise ValueError(f"a turn from {turn.get('from', turn.get('role'))!r} has {content!r} instead of a text")
        messages.append(message)
    return messages


def _calls(value: Any, number: int) -> list[dict[str, Any]]:
    """Return the calls of a turn: one ``{"name": ..., "arguments": ...}``, a list of them, or the JSON text of either."""
    try:
        read = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a turn from 'function_call' is not JSON ({error})") from error
    calls = []
    for place, call in enumerate(read if isinstance(read, list) else [read]):
        function = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a turn from 'function_call' has a call without a name")
        arguments = function.get("arguments", function.get("parameters", {}))
        # as JSON text, as OpenAI has it: Arrow would give each call the arguments of all
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        named = {"name": function["name"], "arguments": text}
        calls.append({"id": f"call_{number}_{place}", "type": "function", "function": named})
    if not calls:
        raise ValueError("a turn from 'function_call' has no call")
    return calls


def schemas_in_full(value: Any) -> Any:
    """Return tools in OpenAI's form, where a list or its JSON text has the functions alone."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value
    except (ValueError, RecursionError):
        return value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "name" in tool for tool in tools):
        return value
    return [{"type": "function", "function": tool} for tool in tools]


def to_messages(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a row whose ShareGPT columns are chat messages; the column ``system`` begins those of a whole conversation.

    Raises DataError: a turn has a role that is not known, or a call that cannot be read.
    """
    converted = dict(values)
    for name, value in values.items():
        if not is_sharegpt(value):
            continue
        if (number := unknown_turn(value)) is not None:
            turn = value[number]
            role = turn.get("from") if isinstance(turn, dict) else turn
            raise DataError(
                f"{name}[{number}] is from {role!r}, which is none of {', '.join(ROLES)}",
                where=where,
                why="its role in the chat is not known",
                fix="rename it; or leave such rows out: hone data convert FILE --to messages --out NEW.parquet",
                code="R42",
            )
        try:
            converted[name] = messages_of_turns(value, values.get(SYSTEM) if name in COLUMNS else None)
        except ValueError as error:
            raise DataError(
                f"{name}: {error}",
                where=where,
                why="the model would learn a turn that is not the one of the file",
                fix='write a text; a call as {"name": "f", "arguments": {...}}, or as a list of them',
                code="R42",
            ) from error
        if "tools" in values:
            converted["tools"] = schemas_in_full(values["tools"])
    return converted


def _role(turn: Any) -> str | None:
    if not isinstance(turn, dict):
        return None
    name = turn.get("role")
    return ROLES.get(str(turn.get("from") if name is None else name).lower())


def _is_data(content: Any) -> bool:
    """Return whether a list has something else than the parts of a message."""
    return isinstance(content, list) and not all(
        isinstance(part, str) or (isinstance(part, dict) and ("text" in part or part.get("type") in PARTS))
        for part in content
    )


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = PARTS.get(str(part.get("type"))) if isinstance(part, dict) else None
    if kind is not None:
        return f"<{kind}>"
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise ValueError(f"a part of a turn has no text: {part!r:.80}")
    return part["text"]
