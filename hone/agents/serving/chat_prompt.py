"""Prompt of a chat: its messages checked, and rendered as tokens."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import Message
from hone.agents.rendering import Ending, Renderer
from hone.agents.serving.errors import bad_request
from hone.agents.serving.service import Service
from hone.agents.serving.session import Prompt, Session
from hone.agents.serving.wire import ChatBody
from hone.data.chat import template_of
from hone.errors import DataError
from hone.text import is_valid

ROLES = ("system", "user", "assistant", "tool")
MAX_DEPTH = 100
"""Maximum depth of nested values in a request; templates and JSON recurse once for each level."""
_TEMPLATE_PARAMETERS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""Arguments that the server gives to a chat template itself."""


def checked_messages(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Check a request's messages; return them with text contents and tool results with tool names."""
    checked: list[Message] = []
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        role = "system" if message.get("role") == "developer" else message.get("role")
        if role not in ROLES:
            raise bad_request(f"role {_shown(role)} is not one of {', '.join(ROLES)}", f"{where}.role")
        clean: Message = {"role": role, "content": _text(message.get("content"), where)}
        calls = _checked_calls(message.get("tool_calls"), f"{where}.tool_calls")
        names |= {call.get("id") or "": call["function"]["name"] for call in calls}
        if calls:
            clean["tool_calls"] = calls
        elif role != "assistant" and message.get("content") is None:
            raise bad_request(f"a message of role {role} has no content", f"{where}.content")
        if isinstance(message.get("reasoning_content"), str):
            clean["reasoning_content"] = message["reasoning_content"]
        if isinstance(message.get("reasoning_signature"), str):
            clean["reasoning_signature"] = message["reasoning_signature"]
        if role == "tool":
            clean |= _result_fields(message, names, where)
        checked.append(clean)
    return checked


def _result_fields(message: Mapping[str, Any], names: Mapping[str, str], where: str) -> Message:
    call = message.get("tool_call_id")
    if not isinstance(call, str):
        raise bad_request("a tool result has no tool_call_id", f"{where}.tool_call_id")
    name = message.get("name") or names.get(call, "")
    if not isinstance(name, str):
        raise bad_request(f"the name of a tool is text, not {_shown(name)}", f"{where}.name")
    return {"tool_call_id": call, "name": name}


def check_tools(tools: Sequence[dict[str, Any]]) -> None:
    for number, tool in enumerate(tools):
        where = f"tools.{number}"
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise bad_request(f"a tool is a function with a name, not {_shown(function)}", f"{where}.function")
        check_value(tool, where)


def check_template_arguments(kwargs: Mapping[str, Any]) -> None:
    taken = sorted(_TEMPLATE_PARAMETERS & kwargs.keys())
    if taken:
        raise bad_request(f"the server sets the template's argument '{taken[0]}'; remove it", "chat_template_kwargs")
    check_value(dict(kwargs), "chat_template_kwargs")


def check_value(value: Any, where: str) -> None:
    """Check that a decoded JSON value can be rendered: nested little, finite numbers, valid text."""
    level = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        for item in level:
            if isinstance(item, str) and not is_valid(item):
                raise bad_request("the text has a lone surrogate, which cannot be encoded", where)
            if isinstance(item, float) and not math.isfinite(item):
                raise bad_request(f"{item} is not a number of JSON", where)
        level = [part for item in level for part in _parts(item)]
    raise bad_request(f"values are nested more than {MAX_DEPTH} deep", where)


def texts(value: Any) -> Iterator[str]:
    """Yield all text in a value that :func:`check_value` accepts."""
    if isinstance(value, str):
        yield value
    for part in _parts(value):
        yield from texts(part)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise bad_request(f"tool calls are a list, not {_shown(calls)}", where)
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request("a tool call has no function with a name", where)
        if not isinstance(call.get("id"), str | None):
            raise bad_request(f"the id of a tool call is text, not {_shown(call['id'])}", where)
        arguments = function.get("arguments")
        if not isinstance(arguments, str | dict | None):
            raise bad_request(f"the arguments of a call are JSON text or an object, not {_shown(arguments)}", where)
        check_value(call, where)
        if isinstance(arguments, str):
            _check_arguments(arguments, where)
    return calls


def _check_arguments(arguments: str, where: str) -> None:
    """Check the arguments of a call; text that is not JSON is kept as text (a malformed call)."""
    try:
        value = json.loads(arguments)
    except RecursionError:
        raise bad_request(f"the arguments of a call are nested more than {MAX_DEPTH} deep", where) from None
    except ValueError:
        return
    check_value(value, where)


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    kind = (
        next((part.get("type") for part in content if isinstance(part, dict) and part.get("type") != "text"), None)
        if isinstance(content, list)
        else None
    )
    if isinstance(kind, str):
        raise bad_request(
            f"this server's model reads text only, and the content has a part of type {_shown(kind)}; send text parts",
            f"{where}.content",
        )
    raise bad_request("content is neither text nor a list of text parts, the only supported forms", f"{where}.content")


def _shown(value: Any) -> str:
    shown = value if isinstance(value, str) else f"a JSON {type(value).__name__}"
    return repr(shown[:40]) if isinstance(value, str) else shown


_EFFORT = "reasoning_effort"


def chat_prompt(
    service: Service,
    session: Session,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
    ending: Ending,
) -> tuple[Renderer, Prompt]:
    """Return the renderer and the prompt of a chat."""
    check_template_arguments(template_kwargs)
    check_tools(tools)
    checked = checked_messages(messages)
    service.prompt_size.check(texts([checked, tools, template_kwargs]), "messages")
    renderer = service.renderer_for(template_kwargs)
    try:
        return renderer, session.prompt(renderer, checked, tools or None, ending)
    except DataError as error:
        named = service.named(error)
        raise bad_request(f"{named.what}; {named.fix}", "messages") from error


def template_kwargs(service: Service, body: ChatBody) -> dict[str, Any]:
    """Return the arguments of the chat template that a request names.

    Raises:
        ApiError: it has a reasoning effort, and the template does not use it.
    """
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    if _EFFORT not in template_of(service.tokenizer):
        raise bad_request(
            f"the chat template of model '{service.model}' does not use {_EFFORT}; remove the field", _EFFORT
        )
    return {_EFFORT: body.reasoning_effort, **body.chat_template_kwargs}


def ending_of(
    messages: Sequence[dict[str, Any]], *, continue_final_message: bool, add_generation_prompt: bool | None
) -> Ending:
    """Return the end of the prompt that a request wants."""
    if not continue_final_message:
        return Ending.CLOSED if add_generation_prompt is False else Ending.REPLY
    if add_generation_prompt:
        raise bad_request(
            "continue_final_message continues the last turn and add_generation_prompt begins a new one; set one of them",
            "continue_final_message",
        )
    if messages[-1].get("role") != "assistant" or messages[-1].get("tool_calls"):
        raise bad_request(
            "continue_final_message needs an assistant message without tool calls as the last one", "messages"
        )
    return Ending.OPEN
