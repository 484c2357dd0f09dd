"""``/v1/responses``: OpenAI's Responses API, translated to a chat and recorded like one."""

from __future__ import annotations

import copy
import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hone.agents.messages import Message
from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.service import Service
from hone.agents.serving.session import Session
from hone.agents.serving.translated import Event, ReplyEvents, TranslatedCall, chat_tool, check_fields, fields_named
from hone.agents.serving.wire import ChatBody, Count, Objects, StreamOptions, parse

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


def text_part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def reasoning_part() -> dict[str, Any]:
    return {"type": "reasoning_text", "text": ""}


def call_item(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": new_id("fc"),
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def new_id(prefix: str) -> str:
    """Return a new id that callers cannot guess."""
    return f"{prefix}_{secrets.token_hex(16)}"


UNSUPPORTED = {
    "background": "a response is computed while its request is open",
    "conversation": "the server has no conversations; send the items, or previous_response_id",
    "prompt": "the server has no prompt templates; send the text as instructions",
    "context_management": "the server never shortens a conversation",
}
"""Fields of the Responses API that cannot be served, unless false or empty, each with the reason."""
LOG_PROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"  # clients ask for it by habit; reasoning is given as the model writes it
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


def chat_body(body: ResponsesBody, earlier: Sequence[Message]) -> ChatBody:
    """Return the body of the equivalent chat request, after the messages of the response that it continues."""
    _check(body)
    system: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = [*system, *earlier, *messages_from(body.input)]
    more = body.model_extra or {}
    fields: dict[str, Any] = {
        **{name: value for name, value in more.items() if name not in UNSUPPORTED},
        "model": body.model,
        "messages": messages,
        "tools": [_tool(tool, number) for number, tool in enumerate(body.tools)],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _response_format(body.text.format),
        "reasoning_effort": body.reasoning.get("effort"),
        "logprobs": LOG_PROBS in body.include or bool(more.get("top_logprobs")),
        "stream": body.stream,
        "stream_options": {"include_usage": True},
    }
    with fields_named(_NAMES):
        return parse(ChatBody, fields)


def _check(body: ResponsesBody) -> None:
    check_fields(body.model_extra or {}, UNSUPPORTED, ChatBody.model_fields.keys() - _OF_CHAT_ALONE, ResponsesBody)
    for name in body.include:
        if name not in (LOG_PROBS, _ENCRYPTED):
            raise bad_request(f"include={name[:80]!r} is not supported; supported is {LOG_PROBS}", "include")
    served = (("summary", "auto"),)  # left to the server
    refused = (one for one in body.reasoning.items() if one[0] != "effort" and one[1] and one not in served)
    summary = next((name for name, _ in refused), None)
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
    return chat_tool(function, tool.get("strict"))


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


class EventSequence(ReplyEvents):
    """Events of one response, in OpenAI's order.

    response.created, response.in_progress
      response.output_item.added
        response.content_part.added
          response.output_text.delta ...           (or response.reasoning_text.delta ...)
        response.output_text.done, response.content_part.done
      response.output_item.done
      response.output_item.added                   (a function call)
        response.function_call_arguments.delta, .done
      response.output_item.done
    response.completed                             (or response.incomplete)
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []  # items until now; the last one may be unfinished
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._log_probs: list[dict[str, Any]] = []  # of tokens whose text is held back

    def grow(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        self._log_probs += (choice.get("logprobs") or {}).get("content") or ()
        yield from super().grow(choice)

    def event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def text(self, delta: str) -> Iterator[Event]:
        yield from self._begin("message")
        item, part = self._current()
        log_probs, self._log_probs = self._log_probs, []
        part["text"] += delta
        part["logprobs"] += log_probs
        yield self.event("response.output_text.delta", **self._where(item), delta=delta, logprobs=log_probs)

    def reasoning(self, delta: str) -> Iterator[Event]:
        yield from self._begin("reasoning")
        item, part = self._current()
        part["text"] += delta
        yield self.event("response.reasoning_text.delta", **self._where(item), delta=delta)

    def call(self, call: dict[str, Any]) -> Iterator[Event]:
        if "id" in call:
            yield from self.end()
            self._open = {**call_item(call), "arguments": "", "status": "in_progress"}
            self.output.append(self._open)
            yield self.event("response.output_item.added", output_index=len(self.output) - 1, item=dict(self._open))
        item, arguments = self._unfinished(), call["function"].get("arguments")
        if arguments:
            item["arguments"] += arguments
            yield self.event("response.function_call_arguments.delta", **self._place(item), delta=arguments)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """Yield the events that end the unfinished item, if there is one."""
        if self._open is None:
            return
        if self._open["type"] == "function_call":
            yield from self._end_call(self._open)
            return
        item, part = self._current()
        where, self._open = self._where(item), None
        if part["type"] == "output_text":
            item["status"] = status
            yield self.event("response.output_text.done", **where, text=part["text"], logprobs=part["logprobs"])
        else:
            yield self.event("response.reasoning_text.done", **where, text=part["text"])
        yield self.event("response.content_part.done", **where, part=part)
        yield self.event("response.output_item.done", output_index=where["output_index"], item=item)

    def finish(self, status: str) -> Iterator[Event]:
        """Yield the events that end the output; a reply without text and calls has an empty text.

        Log-probs of tokens without text, such as the one that ends the reply, belong to the last text.
        """
        if all(item["type"] == "reasoning" for item in self.output):
            yield from self._begin("message")
        if self._open is not None and self._open["type"] == "message":
            self._open["content"][0]["logprobs"] += self._log_probs
        yield from self.end(status)

    def _end_call(self, item: dict[str, Any]) -> Iterator[Event]:
        place, self._open = self._place(item), None
        item["status"] = "completed"
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield self.event("response.function_call_arguments.done", **place, **done)
        yield self.event("response.output_item.done", output_index=place["output_index"], item=item)

    def _begin(self, kind: str) -> Iterator[Event]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self.end()
        part: dict[str, Any] = text_part() if kind == "message" else reasoning_part()
        if kind == "message":
            item = {"type": kind, "id": new_id("msg"), "status": "in_progress", "role": "assistant", "content": [part]}
        else:
            item = {"type": kind, "id": new_id("rs"), "summary": [], "content": [part]}
        self._open = item
        self.output.append(item)
        place = len(self.output) - 1
        yield self.event("response.output_item.added", output_index=place, item={**item, "content": []})
        yield self.event("response.content_part.added", **self._where(item), part=copy.deepcopy(part))

    def _unfinished(self) -> dict[str, Any]:
        if self._open is None:
            raise ValueError("no item is unfinished")
        return self._open

    def _current(self) -> tuple[dict[str, Any], dict[str, Any]]:
        item = self._unfinished()
        return item, item["content"][0]

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.output) - 1}

    def _where(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**self._place(item), "content_index": 0}


class ResponsesCall(TranslatedCall):
    """Call to ``/v1/responses``, answered and recorded as a chat; ``store`` has earlier responses."""

    def __init__(
        self, service: Service, session: Session | None, body: ResponsesBody, number: str, store: ResponseStore
    ) -> None:
        self._store, self._owner = store, session.name if session else None
        name = body.previous_response_id
        earlier = store.get(name, self._owner, "previous_response_id").messages if name else ()
        chat = chat_body(body, earlier)
        self._conversation: list[Message] = [*earlier, *messages_from(body.input)]
        super().__init__(service, session, body, chat, number, _NAMES)
        self._id, self._created, self._events = new_id("resp"), time.time(), EventSequence()

    async def whole(self) -> dict[str, Any]:
        answer = await self._chat.whole()
        (choice,) = answer["choices"]
        status = _status(choice["finish_reason"])
        for _ in (*self._events.grow(choice), *self._events.finish(status)):
            pass
        return self._finished(status, answer["usage"], self._token_ids(answer))

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        events, usage, status = self._events, None, "completed"
        for kind in ("response.created", "response.in_progress"):
            yield events.event(kind, response=self._response("in_progress", None))
        async for chunk in self._chat.chunks():
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                for event in events.grow(choice):
                    yield event
                if choice["finish_reason"] is not None:
                    status = _status(choice["finish_reason"])
        for event in events.finish(status):
            yield event
        yield events.event(f"response.{status}", response=self._finished(status, usage))

    def failure(self, error: ApiError) -> dict[str, Any]:
        return self._events.event("error", **{**error.body()["error"], "type": "error"})

    def _finished(
        self, status: str, usage: dict[str, int] | None, more: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return the complete response, with more fields, and keep it for later ones."""
        response = {**self._response(status, usage), **more}
        if self.body.store:
            self._store.put(response, [*self._conversation, *messages_from(response["output"])], self._owner)
        return response

    def _response(self, status: str, usage: dict[str, int] | None) -> dict[str, Any]:
        body, chat = self.body, self._chat.body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": body.model,
            "output": list(self._events.output),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.get("effort"), "summary": None},
            "store": body.store,
            "temperature": chat.temperature,
            "text": {"format": body.text.format},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_p": chat.top_p,
            "truncation": body.truncation,
            "usage": None if usage is None else _usage(usage),
        }


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _usage(usage: dict[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


MAX_RESPONSES = 10_000
"""Maximum of stored responses; the oldest are dropped."""
MAX_BYTES = 64 * 2**20
"""Maximum of their conversations, as bytes of JSON."""


@dataclass(frozen=True)
class Stored:
    """Response with the conversation that it ends."""

    response: dict[str, Any]
    messages: tuple[Message, ...]  # its conversation without instructions
    owner: str | None  # name of the session that it belongs to; None without a session
    size: int  # bytes that it counts for


class ResponseStore:
    """Latest responses by id; used from the event loop and from the threads that read requests."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = 0

    def put(self, response: dict[str, Any], messages: Sequence[Message], owner: str | None) -> None:
        """Store a response; the oldest ones make place for it."""
        size = len(json.dumps([response, *messages]))
        with self._lock:
            self._stored[response["id"]] = Stored(response, tuple(messages), owner, size)
            self._bytes += size
            while len(self._stored) > MAX_RESPONSES or self._bytes > MAX_BYTES:
                self._bytes -= self._stored.popitem(last=False)[1].size

    def get(self, name: str, owner: str | None, param: str | None = None) -> Stored:
        """Return a response of this owner; the error for another one names the field ``param``."""
        with self._lock:
            stored = self._stored.get(name)
        if stored is None or stored.owner != owner:
            raise _missing(name, param)
        return stored

    def delete(self, name: str, owner: str | None) -> None:
        stored = self.get(name, owner)
        with self._lock:
            if self._stored.pop(name, None) is not None:
                self._bytes -= stored.size


def _missing(name: str, param: str | None) -> ApiError:
    return ApiError(
        404,
        f"response '{name[:80]}' is not stored; the server keeps the latest {MAX_RESPONSES} in memory that were sent with "
        "store=true, and a restart forgets them; send the whole conversation as input",
        code="response_not_found",
        param=param,
    )
