"""Check that a rendering shows every text, call and tool of a conversation, each message in its own span.

A template decides what of a message it shows, and many show less than a file holds: content in parts, calls, reasoning of earlier
turns. What is missing is missing from training without a word, so :func:`missing_part` looks for it.

Equal are: outer white space; arguments of calls that are the same JSON; text that the template writes as JSON. Reasoning of a turn
before the last may be left out, and is counted; a system message may be anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold its reasoning."""
_THOUGHT_MARK = re.compile(
    r"</?(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)>|\[/?THINK\]|◁/?think▷"
    r"|<\|(?:begin|end)_of_thought\|>|<\|channel>thought\b|<channel\|>"
)
_SHOWN = 80


@dataclass(frozen=True)
class Missing:
    """A part that a rendering lacks.

    Attributes:
        message: number of the message; None for a tool of the conversation.
        what: kind of part: text, reasoning, call, argument or tool.
        text: the part itself.
    """

    message: int | None
    what: str
    text: str

    def __str__(self) -> str:
        where = "" if self.message is None else f" of message {self.message}"
        return f"the {self.what}{where}: {self.text[:_SHOWN]!r}{' ...' if len(self.text) > _SHOWN else ''}"


@dataclass
class Shown:
    """Places of a conversation in its rendering.

    Attributes:
        spans: where the first part of each message begins and its last part ends; equal where a message says nothing.
        dropped: turns whose reasoning the template leaves out.
    """

    spans: list[tuple[int, int]]
    dropped: int = 0


def missing_part(
    text: str, starts: Sequence[int | None], messages: Messages, tools: Sequence[Mapping[str, Any]] = ()
) -> Missing | Shown:
    """Return the first part that a rendering lacks, or where the parts are.

    Args:
        text: the rendering.
        starts: where each message begins, as in :class:`~hone.data.template_limits.Trace`; all None where that is not known, and
            the parts are then looked for in the order of the messages.
        messages: the conversation.
        tools: function schemas that the rendering shows.
    """
    last = max((n for n, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
    shown, cursor = Shown([]), 0
    known = any(start is not None for start in starts)
    for number, message in enumerate(messages):
        begin, end = _region(starts, number, len(text)) if known else (cursor, len(text))
        regions = [(begin, end)]
        if message["role"] == "tool":  # templates show results within the turn that called, or all in one turn
            regions.append(_of_calls(starts, messages, number, len(text)) if known else (0, len(text)))
        elif message["role"] in ("system", "developer"):
            regions.append((0, len(text)))
        places: list[tuple[int, int]] = []
        for what, part in _parts(message):
            at_place = next((at for region in regions if (at := _find(text, part, *region)) is not None), None)
            if at_place is not None:
                places.append(at_place)
            elif what == "reasoning" and number < last:
                shown.dropped += 1
            else:
                return Missing(number, what, part)
        call_from = begin
        for call in message.get("tool_calls") or ():
            call_place = _find_call(text, call, call_from, end)
            if isinstance(call_place, Missing):
                return Missing(number, call_place.what, call_place.text)
            call_from = call_place[1]
            places.append(call_place)
        first, last_end = min((at for at, _ in places), default=begin), max((at for _, at in places), default=begin)
        shown.spans.append((first, last_end))
        if not known and message["role"] not in ("system", "developer"):
            cursor = max(cursor, last_end)
    rest = list(text)  # the tools are shown outside of what the messages say
    for first, end in shown.spans if tools else ():
        rest[first:end] = " " * (end - first)
    outside = "".join(rest)
    for tool in tools:
        for part in _parts_of_tool(tool):
            if _find(outside, part, 0, len(outside)) is None:
                return Missing(None, "tool", part)
    return shown


def holds(text: str, message: Mapping[str, Any]) -> bool:
    """Return whether a text has every part of a message except its reasoning."""
    plain = {key: value for key, value in message.items() if key not in THOUGHT_KEYS}
    # before another assistant turn, reasoning may be left out
    return isinstance(missing_part(text, [0, len(text)], [plain, {"role": "assistant", "content": ""}]), Shown)


def _region(starts: Sequence[int | None], number: int, size: int) -> tuple[int, int]:
    before = next((start for start in reversed(starts[: number + 1]) if start is not None), 0)
    after = next((start for start in starts[number + 1 :] if start is not None), size)
    return before, after


def _of_calls(starts: Sequence[int | None], messages: Messages, number: int, size: int) -> tuple[int, int]:
    """Return the span from the turn that called to the next message that is not a result."""
    first = next((n for n in range(number, -1, -1) if messages[n]["role"] == "assistant"), 0)
    last = next((n for n in range(number, len(messages)) if messages[n]["role"] != "tool"), len(messages))
    return _region(starts, first, size)[0], _region(starts, last - 1, size)[1]


def _parts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield kind and text of each part of a message that is text."""
    thoughts = [message.get(key) for key in THOUGHT_KEYS]
    yield from (("reasoning", thought) for thought in dict.fromkeys(t for t in thoughts if isinstance(t, str)))
    content = message.get("content")
    for text in texts_of(content):
        *thoughts, answer = _THOUGHT_MARK.split(text) if message.get("role") == "assistant" else [text]
        yield from (("reasoning", thought) for thought in thoughts)
        yield "text", answer


def texts_of(content: Any) -> list[str]:
    """Return the texts of a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    texts = [part if isinstance(part, str) else part.get("text") for part in parts if isinstance(part, str | dict)]
    return [text for text in texts if isinstance(text, str)]


def _parts_of_tool(tool: Mapping[str, Any]) -> Iterator[str]:
    function = tool.get("function", tool)
    if isinstance(function, Mapping):
        yield str(function.get("name") or "")
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        yield from map(str, properties if isinstance(properties, Mapping) else ())


def _find(text: str, part: str, begin: int, end: int) -> tuple[int, int] | None:
    """Return where a part is in a span of the rendering, or None. A part without text is at the begin."""
    part = part.strip()
    for form in dict.fromkeys((part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1])):
        at = text.find(form, begin, end)
        if at >= 0:
            return at, at + len(form)
    return None


def _find_call(text: str, call: Any, begin: int, end: int) -> tuple[int, int] | Missing:
    """Return where a call is in a span, or what of it is missing.

    Its arguments are there as JSON, or each key and value in the template's own notation. Python's notation of a mapping is
    neither: a template that inserts arguments as they are expects JSON text.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name, arguments = str(function.get("name") or ""), function.get("arguments")
    place = _find(text, name, begin, end)
    if place is None:
        return Missing(None, "call", name)
    if isinstance(arguments, str):
        value = _loaded(arguments)
        if not isinstance(value, dict):
            at_place = _find(text, arguments, begin, end)
            return Missing(None, "argument", arguments) if at_place is None else _both(at_place, place)
        arguments = value
    if not isinstance(arguments, Mapping) or not arguments:
        return place
    as_json = _find_json(text, arguments, begin, end)
    if as_json is not None:
        return _both(as_json, place)
    if str(arguments) in text[begin:end]:
        return Missing(None, "argument", json.dumps(arguments, ensure_ascii=False))
    for part in _leaves(arguments):
        at_place = next((at for form in part if (at := _find(text, form, begin, end)) is not None), None)
        if at_place is None:
            return Missing(None, "argument", part[0])
        place = _both(place, at_place)
    return place


def _both(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return min(one[0], other[0]), max(one[1], other[1])


def _leaves(value: Any) -> Iterator[tuple[str, ...]]:
    """Yield the notations of each key and value."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield (str(key),)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield (value,) if isinstance(value, str) else (json.dumps(value), str(value))


def _find_json(text: str, value: Any, begin: int, end: int) -> tuple[int, int] | None:
    """Return where a span has JSON text that equals a value."""
    decoder = json.JSONDecoder()
    at = text.find("{", begin, end)
    while at >= 0:
        try:
            decoded, stop = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            decoded, stop = None, at
        if stop <= end and decoded is not None and (decoded == value or value in _within(decoded)):
            return at, stop
        at = text.find("{", at + 1, end)
    return None


def _within(value: Any) -> list[Any]:
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [*items, *(deep for item in items for deep in _within(item))]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
