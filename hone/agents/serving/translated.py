"""Common parts of the APIs whose requests become a chat, and whose answers encode its reply: fields, the call, events."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hone.agents.serving.chat import ChatCall
from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.service import Service
from hone.agents.serving.session import Session
from hone.agents.serving.wire import ChatBody
from hone.errors import did_you_mean

Event = dict[str, Any]


@contextlib.contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Give errors of a chat the names of the fields of another API, by those of a chat."""
    try:
        yield
    except ApiError as error:
        raise error.with_names(names) from error


def check_fields(more: Mapping[str, Any], unsupported: Mapping[str, str], others: Collection[str], kind: Any) -> None:
    """Check the fields of a request that its body does not declare.

    Args:
        more: the fields.
        unsupported: fields that must be false or empty, each with the reason.
        others: names of fields that are allowed.
        kind: class of the body.
    """
    for name, value in more.items():
        if name in unsupported:
            if value and any(value.values() if isinstance(value, dict) else [value]):
                raise bad_request(f"'{name}' is not supported: {unsupported[name]}", name, "unsupported_parameter")
        elif name not in others:
            near = did_you_mean(name, [*kind.model_fields, *others])
            raise bad_request(f"unknown field '{name[:80]}'. {near}", name[:80], "unknown_parameter")


def chat_tool(function: Mapping[str, Any], strict: Any) -> dict[str, Any]:
    """Return a tool in the form of chat."""
    return {"type": "function", "function": {**function, **({"strict": True} if strict is True else {})}}


class TranslatedCall:
    """Call that is answered and recorded as a chat.

    ``body`` is the request, ``chat`` its translation, and ``names`` are those of its fields by those of a chat.
    """

    def __init__(
        self,
        service: Service,
        session: Session | None,
        body: Any,
        chat: ChatBody,
        number: str,
        names: Mapping[str, str],
    ) -> None:
        self.body, self.streams = body, body.stream
        with fields_named(names):
            self._chat = ChatCall(service, session, chat, number)
        self.headers, self.requests = self._chat.headers, self._chat.requests

    def _token_ids(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the tokens of the answer to a chat with one reply, if the caller wants them."""
        if not self._chat.body.return_token_ids:
            return {}
        return {"prompt_token_ids": answer["prompt_token_ids"], "token_ids": answer["choices"][0]["token_ids"]}


class ReplyEvents(ABC):
    """Events of one reply, which is written part by part; at most one part is unfinished."""

    def grow(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a chunk of the chat, or of its complete message."""
        delta = choice["message"] if "message" in choice else choice["delta"]
        if delta.get("reasoning_content"):
            yield from self.reasoning(delta["reasoning_content"])
        if delta.get("content"):
            yield from self.text(delta["content"])
        for call in delta.get("tool_calls") or ():
            yield from self.call(call)

    @abstractmethod
    def reasoning(self, delta: str) -> Iterator[Event]:
        """Yield the events of more reasoning."""

    @abstractmethod
    def text(self, delta: str) -> Iterator[Event]:
        """Yield the events of more text."""

    @abstractmethod
    def call(self, call: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a part of a tool call in the form of chat; the first part has its id."""
