"""Bodies of requests to ``/v1/messages``, and their translation to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from hone.agents.messages import Message
from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.wire import ChatBody, Count, Objects, parse
from hone.errors import did_you_mean
from hone.generation.limits import MAX_STOPS

ABOUT_THE_CALLER = (
    "cache_control",
    "diagnostics",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)
"""Fields about the caller or the provider that do not affect the answer."""
UNSUPPORTED = {
    "container": "this server runs no code; offer a tool that does",
    "mcp_servers": "this server connects to no MCP server; offer its tools as tools",
    "fallbacks": "this server has one model",
    "compaction": "the server never shortens a conversation",
    "thread": "the server has no threads; send the messages",
}
"""Fields of the Messages API that cannot be served, unless false or empty, each with the reason."""
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Fields of chat, and the fields here that they come from."""
EXTENSIONS = (
    "seed",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "chat_template_kwargs",
    "return_token_ids",
)
"""Fields of chat that this server accepts here too, beyond Anthropic's."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"max": "xhigh"}
_THINKING_SWITCH, _EFFORT = "enable_thinking", "reasoning_effort"
_KEEPS_ALL = "all"


class CountBody(BaseModel):
    """Body of a request to ``/v1/messages/count_tokens``."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[Objects, Field(min_length=1)]
    system: Any = None
    """Text, or a list of blocks."""
    tools: Objects = []
    tool_choice: dict[str, Any] = {"type": "auto"}
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}
    context_management: dict[str, Any] = {}

    @property
    def more(self) -> dict[str, Any]:
        return self.model_extra or {}


class MessagesBody(CountBody):
    """Body of a request to ``/v1/messages``."""

    max_tokens: Count
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS), FailFast()] = []
    temperature: Any = 1.0
    top_p: Any = 1.0
    top_k: Any = -1
    stream: bool = False

    @property
    def omits_thinking(self) -> bool:
        """True if the caller wants signatures of reasoning without its text."""
        return self.thinking.get("display") == "omitted"


def chat_body(body: CountBody, messages: Sequence[Message], template: str) -> ChatBody:
    """Return the body of the equivalent chat request; the template decides which settings of reasoning the model has.

    The maximum of tokens is not in it: unlike in chat, it may exceed the context.
    """
    _check(body)
    fields: dict[str, Any] = {
        **{name: value for name, value in body.more.items() if name in EXTENSIONS},
        "model": body.model,
        "messages": list(messages),
        "tools": [_tool(tool, number) for number, tool in enumerate(body.tools)],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": not body.tool_choice.get("disable_parallel_tool_use"),
        "response_format": _response_format(body.output_config.get("format")),
        "continue_final_message": messages[-1]["role"] == "assistant",
        "stream_options": {"include_usage": True},
    }
    kwargs = _thinking(body.thinking, template)
    if kwargs:
        fields["chat_template_kwargs"] = {**kwargs, **(fields.get("chat_template_kwargs") or {})}
    effort = body.output_config.get("effort")
    if effort is not None and _EFFORT in template:
        fields[_EFFORT] = _EFFORTS.get(str(effort), effort)
    if isinstance(body, MessagesBody):
        fields |= {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "stream")}
        fields["stop"] = body.stop_sequences
    try:
        return parse(ChatBody, fields)
    except ApiError as error:
        raise renamed(error) from error


def renamed(error: ApiError) -> ApiError:
    """Return an error of a chat with the names of the fields here."""
    return error.with_names(_NAMES)


def _check(body: CountBody) -> None:
    for name, value in body.more.items():
        if name in UNSUPPORTED:
            if value:
                raise bad_request(f"'{name}' is not supported: {UNSUPPORTED[name]}", name, "unsupported_parameter")
        elif name not in ABOUT_THE_CALLER and name not in EXTENSIONS:
            known = [*MessagesBody.model_fields, *EXTENSIONS]
            raise bad_request(
                f"unknown field '{name[:80]}'. {did_you_mean(name, known)}", name[:80], "unknown_parameter"
            )
    for edit in body.context_management.get("edits") or ():
        if not isinstance(edit, dict) or edit.get("keep") != _KEEPS_ALL:
            raise bad_request(
                "the server never drops a part of a conversation; send context_management without edits",
                "context_management.edits",
                "unsupported_parameter",
            )


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise bad_request(
            f"tools of type {str(kind)[:40]!r} have no schema that this server knows; send it as a tool with an input_schema",
            f"tools.{number}.type",
            "unsupported_parameter",
        )
    if not isinstance(tool.get("input_schema"), dict):
        raise bad_request("a tool has an object as input_schema", f"tools.{number}.input_schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function | ({"strict": True} if tool.get("strict") is True else {})}


def _tool_choice(choice: dict[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise bad_request(f"tool_choice of type {str(kind)[:40]!r} is not one of auto, any, tool, none", "tool_choice")
    return _CHOICES[kind]


def _response_format(form: Any) -> dict[str, Any]:
    if form is None:
        return {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise bad_request("a format has the type json_schema and a schema", "output_config.format")
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}


def _thinking(thinking: dict[str, Any], template: str) -> dict[str, bool]:
    """Return the template's argument for reasoning; a template without one reasons as the model was trained to."""
    kind = thinking.get("type")
    if kind not in (None, "enabled", "adaptive", "between_tools", "disabled"):
        raise bad_request(f"thinking of type {str(kind)[:40]!r} is not one of enabled, adaptive, disabled", "thinking")
    if kind not in ("enabled", "disabled") or _THINKING_SWITCH not in template:
        return {}
    return {_THINKING_SWITCH: kind == "enabled"}
