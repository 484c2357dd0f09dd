"""Calls to ``/v1/chat/completions``: messages to tokens, tokens to messages."""

from __future__ import annotations

import inspect
import json
import math
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import AssistantTurn, Message
from hone.agents.parsers.base import ToolParser
from hone.agents.rendering import Ending, Renderer
from hone.agents.serving import replies
from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.forcing import forced_answer
from hone.agents.serving.replies import TextStream
from hone.agents.serving.service import TOOLS_AS_TEXT, Sampled, Service
from hone.agents.serving.session import Prompt, Session, Turn
from hone.agents.serving.wire import ChatBody
from hone.data.chat import template_of
from hone.errors import DataError
from hone.generation.protocol import Completion, GenerationRequest
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


Delta = dict[str, Any]


class TurnStream:
    """Deltas of one reply in OpenAI's form: reasoning and text as they grow, and each call once it is complete.

    A call that is malformed at the end is text, so no part of a call is sent before its end.

    Args:
        stops: strings that end the text and are not part of it.
        has_tools: True if the reply may have calls.
        max_calls: maximum number of calls that the client receives; None sends all.
    """

    def __init__(
        self, parser: ToolParser, stops: Sequence[str], *, has_tools: bool, max_calls: int | None = None
    ) -> None:
        marks = (*parser.thoughts, *parser.marks)
        self._content, self._reasoning = TextStream(stops, marks), TextStream((), marks)
        self._parser, self._has_tools, self._max_calls = parser, has_tools, max_calls
        self._calls = 0

    def grow(self, turn: AssistantTurn) -> Iterator[Delta]:
        """Yield what is new and settled in a turn that is not complete.

        Text after a call is not settled: another call may follow, and formats differ in the text that they keep between calls.
        """
        yield from _texts("reasoning_content", self._reasoning.grow(turn.reasoning or ""))
        if not turn.calls and not self._may_become_calls(turn.content):
            yield from _texts("content", self._content.grow(turn.content))
        if self._parser.closes_calls:
            sound = next((place for place, call in enumerate(turn.calls) if call.error is not None), len(turn.calls))
            yield from self._call_deltas([call.as_openai() for call in turn.calls[:sound][: self._max_calls]])

    def end(self, message: Message) -> Iterator[Delta]:
        """Yield the rest of the complete reply."""
        yield from _texts("reasoning_content", self._reasoning.end(message.get("reasoning_content") or ""))
        yield from _texts("content", self._content.end(message.get("content") or ""))
        yield from self._call_deltas(message.get("tool_calls") or ())

    @property
    def content(self) -> str:
        return self._content.sent

    def _may_become_calls(self, content: str) -> bool:
        """Return whether text may turn out to be calls, in formats that write them without a mark."""
        return self._has_tools and not self._parser.closes_calls and content.lstrip()[:1] in ("{", "[")

    def _call_deltas(self, calls: Sequence[dict[str, Any]]) -> Iterator[Delta]:
        """Yield the calls that were not sent yet: id and name first, then the arguments."""
        for index in range(self._calls, len(calls)):
            function = calls[index]["function"]
            head = {**calls[index], "function": {"name": function["name"], "arguments": ""}}
            yield {"tool_calls": [{"index": index, **head}]}
            yield {"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]}
        self._calls = max(self._calls, len(calls))


def _texts(key: str, new: str) -> Iterator[Delta]:
    if new:
        yield {key: new}


_CONTEXT_TOKENS = 8
"""Tokens before a reply that are decoded with it: some tokenizers drop the first space of a text."""


class ReplyText:
    """Content of a reply; with ``special_tokens`` it shows them, apart from the one that ends the reply.

    Args:
        service: service that decodes.
        renderer: renderer of the call.
        prompt: prompt of the call.
        special_tokens: True to show special tokens, apart from the one that ends the reply.
    """

    def __init__(self, service: Service, renderer: Renderer, prompt: Prompt, *, special_tokens: bool) -> None:
        self._service, self._renderer, self._prompt, self._special_tokens = service, renderer, prompt, special_tokens

    def plain(self, ids: Sequence[int]) -> str:
        """Return the text of a reply as it was sampled."""
        if not self._special_tokens:
            return self._service.decode(ids)
        return self._after_prompt(ids[:-1] if self._renderer.turn_ended(ids) else ids)

    def content(self, ids: Sequence[int], turn: AssistantTurn) -> str:
        """Return the content of a turn parsed from ``ids``."""
        if turn.reasoning is not None or turn.calls:
            return turn.content
        if self._special_tokens:
            return self.plain(ids)
        if not self._prompt.continues:
            return turn.content
        text = self._after_prompt(ids)
        return text[: len(text) - len(text.lstrip())] + turn.content

    def _after_prompt(self, ids: Sequence[int]) -> str:
        """Decode ids as the continuation of the prompt, its first space included."""
        tail = self._prompt.ids[-_CONTEXT_TOKENS:]
        before = self._service.decode(tail, special_tokens=self._special_tokens)
        text = self._service.decode([*tail, *ids], special_tokens=self._special_tokens)
        return text.removeprefix(before)


class ChatCall:
    """Call to ``/v1/chat/completions``; recorded if it has a session."""

    def __init__(self, service: Service, session: Session | None, body: ChatBody, number: str) -> None:
        service.check_model(body.model)
        self.service, self.body, self.streams = service, body, body.stream
        self.session = session or Session(f"call-{number}")
        self.heading = replies.Heading.start(number, service.model, chat=True)
        self.tools = body.tools or None
        ending = ending_of(
            body.messages,
            continue_final_message=body.continue_final_message,
            add_generation_prompt=body.add_generation_prompt,
        )
        self.renderer: Renderer
        self.prompt: Prompt
        self.renderer, self.prompt = chat_prompt(
            service, self.session, body.messages, body.tools, template_kwargs(service, body), ending
        )
        self.headers = {"X-Hone-Note": TOOLS_AS_TEXT} if self.tools and service.tools_as_text else {}
        forced = forced_answer(self.renderer, body, self.prompt.ids)
        self.forced = forced.ids
        self.prompt = replace(
            self.prompt, given_ids=self.prompt.given_ids + self.forced, ids=self.prompt.ids + self.forced
        )
        self.requests: list[GenerationRequest] = service.requests(
            body, self.prompt, session, number, self.renderer.stop_token_ids, forced.constraint
        )
        self.names = [secrets.token_hex(16) for _ in self.requests]  # unguessable names of the replies
        self.turns: dict[int, Turn] = {}  # recorded replies by their index
        self.reply_text = ReplyText(service, self.renderer, self.prompt, special_tokens=not body.skip_special_tokens)

    async def whole(self) -> dict[str, Any]:
        completions = await self.service.completions(self.requests)
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return self.heading.whole(choices, replies.usage(self.prompt.ids, completions)) | self._prompt_ids()

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer in chunks: reasoning and text as they grow, each call once it is complete."""
        most = None if self.body.parallel_tool_calls else 1
        streams = [
            TurnStream(self.renderer.parser, self.body.stop, has_tools=bool(self.tools), max_calls=most)
            for _ in self.requests
        ]
        seen = [0] * len(self.requests)
        completions: list[Completion] = []
        for index in range(len(self.requests)):
            yield self._delta(index, {"role": "assistant", "content": ""})
        async for sampled in self.service.stream(self.requests):
            index, stream = sampled.choice, streams[sampled.choice]
            fresh, seen[index] = slice(seen[index], len(sampled.ids)), len(sampled.ids)
            if sampled.completion is None:
                turns = self._partial_turns(sampled.ids, fresh.start)
                deltas = [delta for turn in turns for delta in stream.grow(turn)] or [{"content": ""}]
                yield self._delta(index, deltas[0], sampled, fresh)
                for delta in deltas[1:]:
                    yield self._delta(index, delta)
                continue
            completions.append(sampled.completion)
            message = self._message(sampled.completion)
            deltas = list(stream.end(message)) or [{}]
            message = {**message, "content": stream.content}  # the client returns what it received
            self._record(index, sampled.completion, message)
            yield self._delta(index, deltas[0], sampled, fresh)
            for delta in deltas[1:]:
                yield self._delta(index, delta)
            yield self._delta(index, {}, reason=replies.finish_reason(sampled.completion, message))
        if self.body.stream_options.include_usage:
            yield self.heading.chunk([], replies.usage(self.prompt.ids, completions))

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def _record(self, index: int, completion: Completion, message: Message) -> None:
        """Record a reply as tokens and as the message that the client receives, and its calls in the audit log."""
        self.service.audit_calls(message, self.session, self.names[index])
        self.turns[index] = self.session.record(self.prompt, completion, message, self.names[index])

    def _message(self, completion: Completion) -> Message:
        """Return the reply as a message; malformed calls stay text, since OpenAI's form cannot express them."""
        ids = completion.token_ids
        if self.tools and self.body.tool_choice == "none":
            return {"role": "assistant", "content": replies.cut(self.reply_text.plain(ids), self.body.stop)}
        turn = self.renderer.parse(
            self.forced + ids, self.tools, calls_before=self.prompt.calls, prompt_ids=self.prompt.ids
        )
        calls = tuple(call for call in turn.calls if call.error is None)
        unreadable = "".join(call.raw for call in turn.calls if call.error is not None)
        if not self.body.parallel_tool_calls and len(calls) > 1:
            self.session.counts["calls_left_out"] += len(calls) - 1
            calls = calls[:1]
        content = replies.cut(self.reply_text.content(ids, turn) + unreadable, self.body.stop)
        return replace(turn, content=content, calls=calls).message()

    def _partial_turns(self, ids: list[int], seen: int) -> list[AssistantTurn]:
        """Return a reply that is not complete, after the turn up to its first call where that is among the fresh tokens.

        So the text before a call is complete when the call begins.
        """
        turn = self._partial(ids)
        if not turn.calls or self._partial(ids[:seen]).calls:
            return [turn]
        stop = next(stop for stop in range(seen + 1, len(ids) + 1) if self._partial(ids[:stop]).calls)
        return [self._partial(ids[: stop - 1]), turn]

    def _partial(self, ids: list[int]) -> AssistantTurn:
        """Return a reply that is not complete as a turn."""
        if self.tools and self.body.tool_choice == "none":
            return AssistantTurn(self.reply_text.plain(ids))
        settled = self.renderer.parser.settled(self.forced + ids)
        turn = self.renderer.parse(settled, self.tools, calls_before=self.prompt.calls, prompt_ids=self.prompt.ids)
        return replace(turn, content=self.reply_text.content(settled[len(self.forced) :], turn))

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message = self._message(completion)
        self._record(index, completion, message)
        choice: dict[str, Any] = {
            "index": index,
            "message": {**message, "content": message["content"] or (None if message.get("tool_calls") else "")},
            "finish_reason": replies.finish_reason(completion, message),
            "logprobs": None,
        }
        if self.body.logprobs:
            choice["logprobs"] = replies.chat_log_probs(
                self.service.tokenizer, completion.token_ids, completion.log_probs, completion.alternatives
            )
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        sampled: Sampled | None = None,
        fresh: slice = slice(0),
        reason: str | None = None,
    ) -> dict[str, Any]:
        """Return a chunk with a part of a reply, and with the fresh ones of its tokens."""
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        ids = sampled.ids[fresh] if sampled else []
        if self.body.logprobs and sampled and ids:
            choice["logprobs"] = replies.chat_log_probs(
                self.service.tokenizer, ids, sampled.log_probs[fresh], sampled.alternatives[fresh]
            )
        if self.body.return_token_ids and ids:
            choice["token_ids"] = ids
        return self.heading.chunk([choice])

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt.ids} if self.body.return_token_ids else {}
