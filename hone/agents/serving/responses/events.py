"""Events of a streamed response, in OpenAI's order.

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

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hone.agents.serving.responses.items import (
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
)

Event = dict[str, Any]


class EventSequence:
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
