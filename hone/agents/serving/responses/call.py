"""Calls to ``/v1/responses``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from hone.agents.messages import Message
from hone.agents.serving.chat import ChatCall
from hone.agents.serving.errors import ApiError
from hone.agents.serving.responses.items import (
    call_item,
    message_item,
    messages_from,
    new_id,
    output_items,
    reasoning_item,
    reasoning_part,
    text_part,
)
from hone.agents.serving.responses.request import ResponsesBody, chat_body, renamed
from hone.agents.serving.responses.store import ResponseStore
from hone.agents.serving.service import Service
from hone.agents.serving.session import Session

Event = dict[str, Any]


class EventSequence:
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

    def event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def text(self, delta: str, log_probs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        yield from self._begin("message")
        item, part = self._current()
        part["text"] += delta
        part["logprobs"] += log_probs
        where = self._where(item)
        yield self.event("response.output_text.delta", **where, delta=delta, logprobs=list(log_probs))

    def reasoning(self, delta: str) -> Iterator[Event]:
        yield from self._begin("reasoning")
        item, part = self._current()
        part["text"] += delta
        yield self.event("response.reasoning_text.delta", **self._where(item), delta=delta)

    def call(self, call: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a part of a tool call in the form of chat; the first part has its id."""
        if "id" in call:
            yield from self.end()
            self._open = {**call_item(call), "arguments": "", "status": "in_progress"}
            self.output.append(self._open)
            yield self.event("response.output_item.added", output_index=len(self.output) - 1, item=dict(self._open))
        item, arguments = self._unfinished(), call["function"].get("arguments")
        if arguments:
            item["arguments"] += arguments
            yield self.event("response.function_call_arguments.delta", **self._place(item), delta=arguments)

    def add_log_probs(self, log_probs: Sequence[dict[str, Any]]) -> None:
        """Add log-probs of tokens without text, such as the one that ends the reply, to the unfinished text."""
        if self._open is not None and self._open["type"] == "message":
            self._open["content"][0]["logprobs"] += log_probs

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
        """Yield the events that end the output; a reply without any text has an empty one."""
        if not self.output:
            yield from self._begin("message")
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
        item = message_item("", status="in_progress") if kind == "message" else reasoning_item("")
        self._open = item
        self.output.append(item)
        place = len(self.output) - 1
        yield self.event("response.output_item.added", output_index=place, item={**item, "content": []})
        part = text_part("") if kind == "message" else reasoning_part("")
        yield self.event("response.content_part.added", **self._where(item), part=part)

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


class ResponsesCall:
    """Call to ``/v1/responses``, answered and recorded as a chat; ``store`` has earlier responses."""

    def __init__(
        self, service: Service, session: Session | None, body: ResponsesBody, number: str, store: ResponseStore
    ) -> None:
        self.body, self.streams = body, body.stream
        self._store, self._owner = store, session.name if session else None
        name = body.previous_response_id
        earlier = store.get(name, self._owner, "previous_response_id").messages if name else ()
        chat = chat_body(body, earlier)
        self._conversation: list[Message] = [*earlier, *messages_from(body.input)]
        try:
            self._chat = ChatCall(service, session, chat, number)
        except ApiError as error:
            raise renamed(error) from error
        self.headers, self.requests = self._chat.headers, self._chat.requests
        self._id, self._created, self._events = new_id("resp"), time.time(), EventSequence()

    async def whole(self) -> dict[str, Any]:
        answer = await self._chat.whole()
        (choice,) = answer["choices"]
        status = _status(choice["finish_reason"])
        output = output_items(choice["message"], _log_probs(choice), status=status)
        response = self._response(status, output, answer["usage"])
        if self._chat.body.return_token_ids:
            response |= {"prompt_token_ids": answer["prompt_token_ids"], "token_ids": choice["token_ids"]}
        self._keep(response, choice["message"])
        return response

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        events, usage, status = self._events, None, "completed"
        log_probs: list[dict[str, Any]] = []
        reply: Message = {"role": "assistant", "content": ""}
        for kind in ("response.created", "response.in_progress"):
            yield events.event(kind, response=self._response("in_progress", [], None))
        async for chunk in self._chat.chunks():
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta = choice["delta"]
                log_probs += _log_probs(choice)  # of text that is held back, too
                if delta.get("reasoning_content"):
                    reply["reasoning_content"] = reply.get("reasoning_content", "") + delta["reasoning_content"]
                    for event in events.reasoning(delta["reasoning_content"]):
                        yield event
                if delta.get("content"):
                    reply["content"] += delta["content"]
                    for event in events.text(delta["content"], log_probs):
                        yield event
                    log_probs = []
                for call in delta.get("tool_calls") or ():
                    calls = reply.setdefault("tool_calls", [])
                    if "id" in call:
                        calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                    else:
                        calls[-1]["function"]["arguments"] += call["function"]["arguments"]
                    for event in events.call(call):
                        yield event
                if choice["finish_reason"] is not None:
                    status = _status(choice["finish_reason"])
        events.add_log_probs(log_probs)
        for event in events.finish(status):
            yield event
        response = self._response(status, events.output, usage)
        self._keep(response, reply)
        yield events.event(f"response.{status}", response=response)

    def failure(self, error: ApiError) -> dict[str, Any]:
        return self._events.event("error", **{**error.body()["error"], "type": "error"})

    def _keep(self, response: dict[str, Any], reply: Message) -> None:
        if self.body.store:
            self._store.put(response, [*self._conversation, reply], self._owner)

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
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
            "output": output,
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


def _log_probs(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return list((choice.get("logprobs") or {}).get("content") or ())


def _usage(usage: dict[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
