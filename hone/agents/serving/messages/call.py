"""Calls to ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from hone.agents.messages import Message
from hone.agents.serving.chat import ChatCall
from hone.agents.serving.chat_prompt import chat_prompt, ending_of, template_kwargs
from hone.agents.serving.errors import ApiError, bad_request, error_body
from hone.agents.serving.messages.request import CountBody, MessagesBody, chat_body, renamed
from hone.agents.serving.replies import first_stop
from hone.agents.serving.service import Service
from hone.agents.serving.session import Session
from hone.agents.serving.wire import ChatBody
from hone.data.types import StopReason

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


Event = dict[str, Any]


class EventSequence:
    """Events of the blocks of one message."""

    def __init__(self, signature: str, *, omits_thinking: bool) -> None:
        self._signature, self._omits_thinking = signature, omits_thinking
        self._open: str | None = None
        self._count = 0

    def thinking(self, delta: str) -> Iterator[Event]:
        yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        if not self._omits_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": delta})

    def text(self, delta: str) -> Iterator[Event]:
        yield from self._begin("text", {"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": delta})

    def call(self, call: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a part of a tool call in the form of chat; the first part has its id."""
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


class MessagesCall:
    """Call to ``/v1/messages``, answered and recorded as a chat."""

    def __init__(self, service: Service, session: Session | None, body: MessagesBody, number: str) -> None:
        self.body, self.streams = body, body.stream
        chat = _chat_of(service, session, body)
        try:
            self._chat = ChatCall(service, session, chat, number)
        except ApiError as error:
            raise renamed(error) from error
        self._service, self._id = service, f"msg_{secrets.token_hex(16)}"
        (request,) = self._chat.requests
        self._space = request.sampling.max_tokens
        sampling = replace(request.sampling, max_tokens=min(self._space, body.max_tokens))
        self._chat.requests = [replace(request, sampling=sampling)]
        self.headers, self.requests = self._chat.headers, self._chat.requests

    async def whole(self) -> dict[str, Any]:
        answer = await self._chat.whole()
        (choice,) = answer["choices"]
        reply: Message = choice["message"]
        blocks = content_blocks(reply, self._chat.names[0], omits_thinking=self.body.omits_thinking)
        message = self._message(blocks, answer["usage"]["completion_tokens"]) | self._end(choice["finish_reason"])
        if self._chat.body.return_token_ids:
            message |= {"prompt_token_ids": answer["prompt_token_ids"], "token_ids": choice["token_ids"]}
        return message

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        events = EventSequence(self._chat.names[0], omits_thinking=self.body.omits_thinking)
        yield {"type": "message_start", "message": self._message([], 0)}
        yield {"type": "ping"}
        reason, sampled = "stop", 0
        async for chunk in self._chat.chunks():
            sampled = chunk.get("usage", {}).get("completion_tokens", sampled)
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if not any(delta.values()):  # sampled, and not settled: the client sees that the reply grows
                    yield {"type": "ping"}
                if delta.get("reasoning_content"):
                    for event in events.thinking(delta["reasoning_content"]):
                        yield event
                if delta.get("content"):
                    for event in events.text(delta["content"]):
                        yield event
                for call in delta.get("tool_calls") or ():
                    for event in events.call(call):
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
    try:
        ending = ending_of(
            chat.messages, continue_final_message=chat.continue_final_message, add_generation_prompt=None
        )
        _, prompt = chat_prompt(
            service, Session("count"), chat.messages, chat.tools, template_kwargs(service, chat), ending
        )
    except ApiError as error:
        raise renamed(error) from error
    return {"input_tokens": len(prompt.ids)}


def _chat_of(service: Service, session: Session | None, body: CountBody) -> ChatBody:
    def recorded(signature: str) -> str | None:
        turn = session.named(signature) if session else None
        return None if turn is None else turn.messages[-1].get("reasoning_content", "")

    messages = messages_from(body.system, body.messages, recorded)
    return chat_body(body, messages, str(service.tokenizer.chat_template or ""))
