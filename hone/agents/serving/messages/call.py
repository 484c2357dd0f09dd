"""Calls to ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from hone.agents.messages import Message
from hone.agents.serving.chat import ChatCall
from hone.agents.serving.chat_prompt import chat_prompt, ending_of, template_kwargs
from hone.agents.serving.errors import ApiError
from hone.agents.serving.messages.blocks import content_blocks, messages_from, tool_use
from hone.agents.serving.messages.errors import error_body
from hone.agents.serving.messages.request import CountBody, MessagesBody, chat_body, renamed
from hone.agents.serving.replies import first_stop
from hone.agents.serving.service import Service
from hone.agents.serving.session import Session
from hone.agents.serving.wire import ChatBody
from hone.data.types import StopReason

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
