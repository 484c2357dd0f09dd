"""Content blocks of the Messages API: those of a request become messages, a reply becomes blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hone.agents.messages import Message
from hone.agents.serving.errors import bad_request

CALLER_DATA = "x-anthropic-billing-header"
"""Begin of a system block about the caller, which changes from call to call and is not for the model."""
_ERROR = "error: "
"""Begin of a result that reports an error, as in the answers of Hone's own tools."""
Reasoning = Callable[[str], str | None]
"""Function of a signature that returns the reasoning of the recorded reply, or None if it is not recorded."""


def messages_from(system: Any, messages: Sequence[dict[str, Any]], recorded: Reasoning) -> list[Message]:
    """Return a request's system prompt, text or blocks, and its messages in the form of chat.

    Blocks of a user's message become messages in their order: each result one, and the text between results another.
    """
    converted: list[Message] = []
    prompt = _system_text(system)
    if prompt:
        converted.append({"role": "system", "content": prompt})
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            converted.append(_assistant(content, where, recorded))
        elif role in ("user", "system"):
            converted += _given(str(role), content, where)
        else:
            raise bad_request(f"role {str(role)[:40]!r} is not one of user, assistant, system", f"{where}.role")
    return converted


def content_blocks(reply: Message, signature: str, *, omits_thinking: bool) -> list[dict[str, Any]]:
    """Return a reply in the form of chat as blocks: thinking, text, calls.

    A reply without any has an empty text, since clients read the first block.
    """
    blocks: list[dict[str, Any]] = []
    reasoning, calls = reply.get("reasoning_content"), reply.get("tool_calls") or ()
    if reasoning:
        thinking = "" if omits_thinking else reasoning
        blocks.append({"type": "thinking", "thinking": thinking, "signature": signature})
    if reply.get("content") or not (reasoning or calls):
        blocks.append({"type": "text", "text": reply.get("content") or ""})
    return blocks + [tool_use(call, json.loads(call["function"]["arguments"])) for call in calls]


def tool_use(call: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the block of a call in the form of chat, with these arguments."""
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def _system_text(system: Any) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    blocks = _blocks(system, "system")
    texts = [_text(block, f"system.{number}") for number, block in enumerate(blocks)]
    return "\n".join(text for text in texts if not text.startswith(CALLER_DATA))


def _given(role: str, content: Any, where: str) -> list[Message]:
    """Return the messages of a user's or the system's content."""
    converted: list[Message] = []
    for number, block in enumerate(_blocks(content, f"{where}.content")):
        place = f"{where}.content.{number}"
        if block.get("type") == "tool_result" and role == "user":
            converted.append(_result(block, place))
            continue
        text = _text(block, place)
        if converted and converted[-1]["role"] == role:
            converted[-1]["content"] += f"\n{text}"
        else:
            converted.append({"role": role, "content": text})
    if not converted:
        raise bad_request("the content of a message is empty", f"{where}.content")
    return converted


def _result(block: dict[str, Any], where: str) -> Message:
    content = block.get("content")
    parts = [] if content is None else _blocks(content, f"{where}.content")
    text = "\n".join(_text(part, f"{where}.content.{number}") for number, part in enumerate(parts))
    if block.get("is_error") and not text.lower().startswith("error"):
        text = f"{_ERROR}{text}"
    if not isinstance(block.get("tool_use_id"), str):
        raise bad_request("a tool_result has a tool_use_id", where)
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def _assistant(content: Any, where: str, recorded: Reasoning) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for number, block in enumerate(_blocks(content, f"{where}.content")):
        place, kind = f"{where}.content.{number}", block.get("type")
        if kind == "thinking":
            text = _reasoning(block, place, recorded)
            message["reasoning_content"] = message.get("reasoning_content", "") + text
            message["reasoning_signature"] = block.get("signature") or ""
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_call(block, place))
        elif kind == "redacted_thinking":
            raise bad_request("redacted thinking cannot be read by this server; send the message without it", place)
        else:
            message["content"] += _text(block, place)
    return message


def _reasoning(block: dict[str, Any], where: str, recorded: Reasoning) -> str:
    """Return the reasoning of a block, which must be that of the reply that its signature names."""
    text, signature = block.get("thinking"), block.get("signature")
    if not isinstance(text, str) or not isinstance(signature, str | None):
        raise bad_request("a thinking block has the texts thinking and signature", where)
    kept = recorded(signature) if signature else None
    if kept is not None and text not in ("", kept):
        raise bad_request(
            "the thinking differs from that of the reply with this signature; send the block as it was received, or omit it",
            f"{where}.thinking",
        )
    return text if kept is None else kept


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(block.get("id"), str) or not isinstance(name, str) or not isinstance(arguments, dict):
        raise bad_request("a tool_use has the texts id and name, and an object as input", where)
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise bad_request("a content is text or a list of blocks, each with a type", where)


def _text(block: dict[str, Any], where: str) -> str:
    if block.get("type") == "text" and isinstance(block.get("text"), str):
        return block["text"]
    kind = str(block.get("type"))[:40]
    raise bad_request(
        f"this server's model reads text only, and the content has a block of type {kind!r}; send it as text", where
    )
