"""Items of the Responses API: input items become messages, a reply becomes output items."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from hone.agents.messages import Message
from hone.agents.serving.errors import bad_request

TEXT_PARTS = ("input_text", "output_text", "text")


def messages_from(items: str | Sequence[dict[str, Any]]) -> list[Message]:
    """Return the messages of an input: one text, or items.

    A message of the assistant and the calls after it become one message, as the model wrote them in one turn.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    reasoning: str | None = None
    for number, item in enumerate(items):
        where = f"input.{number}"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            reasoning = _reasoning(item, where)
            continue
        if kind == "message":
            message: Message = {"role": item.get("role"), "content": _content(item.get("content"), where)}
        elif kind == "function_call":
            message = {"role": "assistant", "content": "", "tool_calls": [_call(item, where)]}
        elif kind == "function_call_output":
            message = {
                "role": "tool",
                "tool_call_id": item.get("call_id"),
                "content": _content(item.get("output"), where),
            }
        else:
            raise bad_request(_why_not(kind), where)
        if kind == "function_call" and reasoning is None and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if reasoning is not None and message["role"] == "assistant":
            message["reasoning_content"], reasoning = reasoning, None
        messages.append(message)
    return messages


def _content(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            part = {"type": "text", "text": part.get("refusal")}
        elif kind in TEXT_PARTS:
            part = {"type": "text", "text": part.get("text")}
        elif not isinstance(part, dict):
            raise bad_request("a content is text or a list of parts, each with a type", f"{where}.content")
        parts.append(part)
    return parts


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(item.get("call_id"), str) or not isinstance(item.get("name"), str):
        raise bad_request("a function_call has a call_id and a name", where)
    function = {"name": item["name"], "arguments": item.get("arguments")}
    return {"id": item["call_id"], "type": "function", "function": function}


def _reasoning(item: dict[str, Any], where: str) -> str | None:
    if item.get("encrypted_content"):
        raise bad_request("encrypted reasoning cannot be read by this server; send the item without it", where)
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str)) or None


def _why_not(kind: Any) -> str:
    if kind == "item_reference":
        return "item_reference is not supported; send the item itself, or previous_response_id"
    supported = "message, function_call, function_call_output and reasoning"
    return f"input items of type {str(kind)[:40]!r} are not supported; supported are {supported}"


def message_item(text: str, log_probs: Sequence[dict[str, Any]] = (), *, status: str = "completed") -> dict[str, Any]:
    return {
        "type": "message",
        "id": new_id("msg"),
        "status": status,
        "role": "assistant",
        "content": [text_part(text, log_probs)],
    }


def text_part(text: str, log_probs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(log_probs)}


def reasoning_item(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": new_id("rs"), "summary": [], "content": [reasoning_part(text)]}


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def call_item(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": new_id("fc"),
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def output_items(message: Message, log_probs: Sequence[dict[str, Any]], *, status: str) -> list[dict[str, Any]]:
    """Return a reply as output items: reasoning, text, calls."""
    items = [reasoning_item(message["reasoning_content"])] if message.get("reasoning_content") else []
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        items.append(message_item(message.get("content") or "", log_probs, status=status))
    return items + [call_item(call) for call in calls]


def new_id(prefix: str) -> str:
    """Return a new id that callers cannot guess."""
    return f"{prefix}_{secrets.token_hex(16)}"
