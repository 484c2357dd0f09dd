"""Body of a request to ``/v1/responses``, and its translation to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hone.agents.messages import Message
from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.responses.items import messages_from
from hone.agents.serving.wire import ChatBody, Count, Objects, StreamOptions, parse
from hone.errors import did_you_mean

UNSUPPORTED = {
    "background": "a response is computed while its request is open",
    "conversation": "the server has no conversations; send the items, or previous_response_id",
    "prompt": "the server has no prompt templates; send the text as instructions",
    "context_management": "the server never shortens a conversation",
}
"""Fields of the Responses API that cannot be served, unless false or empty, each with the reason."""
LOG_PROBS = "message.output_text.logprobs"
_OF_CHAT_ALONE = {
    "messages",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "stream_options",
    "response_format",
    "logprobs",
    "echo",
    "continue_final_message",
    "add_generation_prompt",
    "reasoning_effort",
}
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chat, and the fields here that they come from."""


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class TextOptions(BaseModel):
    """``text`` of a request."""

    model_config = ConfigDict(extra="forbid")

    format: dict[str, Any] = {"type": "text"}


class ResponsesBody(BaseModel):
    """Body of a request to ``/v1/responses``; sampling fields are those of chat."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: Any
    """Text, or a list of items."""
    instructions: str | None = None
    tools: Objects = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    include: list[str] = []
    truncation: str = "disabled"
    reasoning: dict[str, Any] = {}
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = {}

    @property
    def more(self) -> dict[str, Any]:
        return self.model_extra or {}


def chat_body(body: ResponsesBody, earlier: Sequence[Message]) -> ChatBody:
    """Return the body of the equivalent chat request, after the messages of the response that it continues."""
    _check(body)
    system: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = [*system, *earlier, *messages_from(body.input)]
    fields: dict[str, Any] = {
        **{name: value for name, value in body.more.items() if name not in UNSUPPORTED},
        "model": body.model,
        "messages": messages,
        "tools": [_tool(tool, number) for number, tool in enumerate(body.tools)],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _response_format(body.text.format),
        "reasoning_effort": body.reasoning.get("effort"),
        "logprobs": LOG_PROBS in body.include or bool(body.more.get("top_logprobs")),
        "stream": body.stream,
        "stream_options": {"include_usage": True},
    }
    try:
        return parse(ChatBody, fields)
    except ApiError as error:
        raise renamed(error) from error


def renamed(error: ApiError) -> ApiError:
    """Return an error of a chat with the names of the fields here."""
    return error.with_names(_NAMES)


def _check(body: ResponsesBody) -> None:
    for name, value in body.more.items():
        if name in UNSUPPORTED:
            if value and any(value.values() if isinstance(value, dict) else [value]):
                raise bad_request(f"'{name}' is not supported: {UNSUPPORTED[name]}", name, "unsupported_parameter")
        elif name not in ChatBody.model_fields or name in _OF_CHAT_ALONE:
            known = [*ResponsesBody.model_fields, *(ChatBody.model_fields.keys() - _OF_CHAT_ALONE)]
            raise bad_request(
                f"unknown field '{name[:80]}'. {did_you_mean(name, known)}", name[:80], "unknown_parameter"
            )
    for name in body.include:
        if name != LOG_PROBS:
            raise bad_request(f"include={name[:80]!r} is not supported; supported is {LOG_PROBS}", "include")
    summary = next((name for name, value in body.reasoning.items() if name != "effort" and value), None)
    if summary is not None:
        raise bad_request(
            f"reasoning.{summary[:40]} is not supported: reasoning is given as the model writes it",
            f"reasoning.{summary[:40]}",
        )
    if body.truncation != "disabled":
        raise bad_request(
            "truncation other than 'disabled' would drop messages, which the server never does", "truncation"
        )
    if not isinstance(body.input, str) and not (
        isinstance(body.input, list) and all(isinstance(item, dict) for item in body.input)
    ):
        raise bad_request("'input' is text, or a list of items that are objects", "input")
    if not body.input:
        raise bad_request("'input' is empty", "input")


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(
            f"tools of type {str(tool.get('type'))[:40]!r} run at OpenAI; this server has function tools only",
            f"tools.{number}.type",
            "unsupported_parameter",
        )
    if "function" in tool:
        return tool
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function | ({"strict": True} if tool.get("strict") is True else {})}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise bad_request(
            f"tool_choice of type {str(choice.get('type'))[:40]!r} is not supported; use auto, none, required or a function",
            "tool_choice",
            "unsupported_parameter",
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
