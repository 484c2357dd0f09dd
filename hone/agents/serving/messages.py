"""``/v1/messages``: Anthropic's Messages API, translated to a chat and recorded like one."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from hone.agents.messages import Message
from hone.agents.serving.chat import chat_prompt, ending_of, template_kwargs
from hone.agents.serving.errors import ApiError, bad_request, error_body
from hone.agents.serving.replies import first_stop
from hone.agents.serving.service import Service
from hone.agents.serving.session import Session
from hone.agents.serving.translated import Event, ReplyEvents, TranslatedCall, chat_tool, check_fields, fields_named
from hone.agents.serving.wire import ChatBody, Count, Objects, parse
from hone.data.types import StopReason
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
        **{name: value for name, value in (body.model_extra or {}).items() if name in EXTENSIONS},
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
    with fields_named(_NAMES):
        return parse(ChatBody, fields)


def _check(body: CountBody) -> None:
    others = (*ABOUT_THE_CALLER, *EXTENSIONS)
    check_fields(body.model_extra or {}, UNSUPPORTED, others, MessagesBody)
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
    return chat_tool(function, tool.get("strict"))


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


class EventSequence(ReplyEvents):
    """Events of the blocks of one message."""

    def __init__(self, signature: str, *, omits_thinking: bool) -> None:
        self._signature, self._omits_thinking = signature, omits_thinking
        self._open: str | None = None
        self._count = 0

    def grow(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        if not any(choice["delta"].values()):  # sampled, and not settled: the client sees that the reply grows
            yield {"type": "ping"}
        yield from super().grow(choice)

    def reasoning(self, delta: str) -> Iterator[Event]:
        yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        if not self._omits_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": delta})

    def text(self, delta: str) -> Iterator[Event]:
        yield from self._begin("text", {"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": delta})

    def call(self, call: dict[str, Any]) -> Iterator[Event]:
        if "id" in call:
            yield from self.end()
            yield from self._begin("tool_use", tool_use(call, {}))
        arguments = call["function"].get("arguments")
        if arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def end(self) -> Iterator[Event]:
        """Yield the events that end the unfinished block, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        self._open = None
        yield {"type": "content_block_stop", "index": self._count - 1}

    def finish(self) -> Iterator[Event]:
        """Yield the events that end the last block; a reply without any block has an empty text."""
        if not self._count:
            yield from self._begin("text", {"type": "text", "text": ""})
        yield from self.end()

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self.end()
        self._open, self._count = kind, self._count + 1
        yield {"type": "content_block_start", "index": self._count - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._count - 1, "delta": delta}


_REASONS = {"tool_calls": "tool_use", "stop": "end_turn", "length": "max_tokens"}


class MessagesCall(TranslatedCall):
    """Call to ``/v1/messages``, answered and recorded as a chat."""

    def __init__(self, service: Service, session: Session | None, body: MessagesBody, number: str) -> None:
        super().__init__(service, session, body, _chat_of(service, session, body), number, _NAMES)
        self._service, self._id = service, f"msg_{secrets.token_hex(16)}"
        (request,) = self._chat.requests
        sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens, body.max_tokens))
        self._chat.requests = self.requests = [replace(request, sampling=sampling)]

    async def whole(self) -> dict[str, Any]:
        answer = await self._chat.whole()
        (choice,) = answer["choices"]
        reply: Message = choice["message"]
        blocks = content_blocks(reply, self._chat.names[0], omits_thinking=self.body.omits_thinking)
        message = self._message(blocks, answer["usage"]["completion_tokens"]) | self._end(choice["finish_reason"])
        return message | self._token_ids(answer)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        events = EventSequence(self._chat.names[0], omits_thinking=self.body.omits_thinking)
        yield {"type": "message_start", "message": self._message([], 0)}
        yield {"type": "ping"}
        reason, sampled = "stop", 0
        async for chunk in self._chat.chunks():
            sampled = chunk.get("usage", {}).get("completion_tokens", sampled)
            for choice in chunk["choices"]:
                for event in events.grow(choice):
                    yield event
                reason = choice["finish_reason"] or reason
        for event in events.finish():
            yield event
        usage = {"output_tokens": sampled}
        yield {"type": "message_delta", "delta": self._end(reason), "usage": usage}
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def _message(self, blocks: list[dict[str, Any]], sampled: int) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._service.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(self._chat.prompt.ids),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": sampled,
            },
        }

    def _end(self, finish_reason: str) -> dict[str, Any]:
        """Return why the reply ended: ``stop_reason``, and ``stop_sequence`` if one ended it."""
        completion = self._chat.turns[0].completion
        reason, sequence = _REASONS[finish_reason], None
        if completion.stop_reason is StopReason.LENGTH and finish_reason == "length":
            reason = (
                "max_tokens" if len(completion.token_ids) >= self.body.max_tokens else "model_context_window_exceeded"
            )
        elif reason == "end_turn" and not self._chat.renderer.turn_ended(completion.token_ids):
            sequence = first_stop(self._service.decode(completion.token_ids), self.body.stop_sequences)
            reason = reason if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}


def count_tokens(service: Service, body: CountBody) -> dict[str, Any]:
    """Answer ``/v1/messages/count_tokens``: the tokens of the prompt, rendered without a recorded conversation."""
    service.check_model(body.model)
    chat = _chat_of(service, None, body)
    with fields_named(_NAMES):
        ending = ending_of(
            chat.messages, continue_final_message=chat.continue_final_message, add_generation_prompt=None
        )
        _, prompt = chat_prompt(
            service, Session("count"), chat.messages, chat.tools, template_kwargs(service, chat), ending
        )
    return {"input_tokens": len(prompt.ids)}


def _chat_of(service: Service, session: Session | None, body: CountBody) -> ChatBody:
    def recorded(signature: str) -> str | None:
        turn = session.named(signature) if session else None
        return None if turn is None else turn.messages[-1].get("reasoning_content", "")

    messages = messages_from(body.system, body.messages, recorded)
    return chat_body(body, messages, str(service.tokenizer.chat_template or ""))
