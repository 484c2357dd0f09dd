"""Check chat messages of a file, remove additions of the file format, and write the arguments of calls in another form."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from hone.data.proof import THOUGHT_KEYS
from hone.errors import DataError
from hone.text import check_valid, is_valid

KINDS = ("image", "video", "audio")  # kinds of media
PARTS = {
    part: kind
    for kind in KINDS
    for part in (kind, f"{kind}_url", f"input_{kind}")  # of transformers, and of OpenAI's two APIs
}
"""Kind of each type of a message's part."""


_PLAIN = frozenset((str, int, float, bool, type(None)))


def plain(value: Any) -> Any:
    """Convert numpy arrays and scalars (as pandas reads parquet) to Python lists and numbers."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: item if type(item) in _PLAIN else plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [item if type(item) in _PLAIN else plain(item) for item in value]
    return value


def unwrapped(value: Any) -> Any:
    """Convert an array with :func:`plain` and return other values unchanged: only rows of pandas hold arrays."""
    return plain(value) if isinstance(value, np.ndarray | np.generic) else value


def check_messages(value: Any, *, where: str, column: str) -> list[dict[str, Any]]:
    """Return the messages of one row, each a dict with a role and a content.

    A key of a message whose value is null is removed; nulls in the arguments of calls are data.

    Raises DataError: the value is not a list of messages, is empty, or a message has no role or content.
    """
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else f"a {type(value).__name__}"
        raise DataError(f"column '{column}' is {kind}, not a list of messages", where=where, fix=_FIX, code="R42")
    return [_message(item, f"{column}[{index}]", where) for index, item in enumerate(value)]


def _message(item: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise DataError(f"{name} is a {type(item).__name__}, not a message", where=where, fix=_FIX, code="R42")
    message = {key: value for key, value in item.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{name} has no 'role'", where=where, fix=_FIX, code="R42")
    role = message["role"].strip().lower()
    meant = "assistant" if role in ("model", "gpt", "ai", "bot", "chatgpt") else role
    if meant != message["role"] and meant in ("system", "user", "assistant", "tool"):
        what = f"{name} has role {message['role']!r}, which templates and masks do not know"
        raise DataError(what, where=where, fix=f'write "role": "{meant}"', code="R42")
    if not isinstance(message.get("content"), str | list):
        if not message.get("tool_calls"):
            given = f", but a {type(item['content']).__name__}" if item.get("content") is not None else ""
            what = f"{name} (role {message['role']}) has no 'content' that is a text or a list of parts{given}"
            raise DataError(what, where=where, fix=_FIX, code="R42")
        message["content"] = ""  # an assistant turn that only calls tools
    if isinstance(message["content"], list):
        for index, part in enumerate(message["content"]):
            _check_part(part, f"{name}.content[{index}]", where)
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{name}.tool_calls is not a list of objects", where=where, fix=_FIX_CALLS, code="R42")
    if message.get("function_call"):
        raise DataError(
            f"{name} has 'function_call', the form before 'tool_calls'", where=where, fix=_FIX_CALLS, code="R42"
        )
    for key in THOUGHT_KEYS:
        if not isinstance(message.get(key, ""), str):
            what = f"{name}.{key} is a {type(message[key]).__name__}, not a text"
            raise DataError(what, where=where, fix="write the reasoning as one string", code="R42")
    return message


def _check_part(part: Any, name: str, where: str) -> None:
    """Check that a part of a message's content is a text or a place of media: others would be left out without a word."""
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise DataError(f"{name} is a {type(part).__name__}, not a part", where=where, fix=_FIX_PARTS, code="R42")
    kind = part.get("type")
    if kind == "text" and not isinstance(part.get("text"), str):
        raise DataError(f"{name} has no 'text'", where=where, fix=_FIX_PARTS, code="R42")
    if kind not in ("text", *PARTS):
        raise DataError(f"{name} has type {kind!r}, which is none of text, {', '.join(PARTS)}", where=where,
                        fix=_FIX_PARTS + "; calls belong into tool_calls, results into a message of the role tool", code="R42")  # fmt: skip


def with_arguments(message: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls in another form."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    changed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": form(function["arguments"])}}
        changed.append(call)
    return {**message, "tool_calls": changed}


def as_mapping(arguments: Any) -> Any:
    """Return JSON text as a mapping of valid text; the arguments of a malformed call stay text."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and is_valid(value) else arguments


def as_json(arguments: Any) -> Any:
    """Return a mapping as JSON text, as OpenAI has it; other arguments unchanged."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def schemas_of(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return the function schemas of one row, stored as a list or its JSON text; None if there are none. Raises
    DataError: the value is neither.
    """
    value = plain(value)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(
                f"the tools are not JSON: {error}", where=where, fix="write a JSON list of tools"
            ) from error
    if value in (None, "", []):
        return None
    check_valid(value, where)
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError("the tools are not a list of objects", where=where, fix="write a JSON list of tools")
    return value


_FIX_CALLS = 'write "tool_calls": [{"type": "function", "function": {"name": ..., "arguments": {...}}}]'
_FIX_PARTS = 'write the content as one string, or as parts: [{"type": "text", "text": "..."}, ...]'
_FIX = 'write it as [{"role": "user", "content": "..."}, ...]'
