"""Check that a rendering shows every text, call and tool of a conversation, each message in its own span.

A template decides what of a message it shows, and many show less than a file holds: content in parts, calls, reasoning of earlier
turns. What is missing is missing from training without a word, so :func:`missing_part` looks for it.

Equal are: outer white space; arguments of calls that are the same JSON; text that the template writes as JSON. Reasoning of a turn
that another message follows may be left out, and is counted; a system message may be anywhere outside of what others say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")  # keys of a message that hold its reasoning
_TAGS = r"(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)>"
_OPENS = rf"<{_TAGS}|\[THINK\]|◁think▷|<\|begin_of_thought\|>|<\|channel>thought\b"
_CLOSES = rf"</{_TAGS}|\[/THINK\]|◁/think▷|<\|end_of_thought\|>|<channel\|>"
_THOUGHT = re.compile(rf"\s*(?:{_OPENS})(.*?)(?:{_CLOSES})", re.DOTALL)
THOUGHT_MARK = re.compile(rf"{_OPENS}|{_CLOSES}")  # what begins or ends reasoning in a text
_MARK = re.compile(r"<[|｜]?/?\w{1,40}[|｜]?>")
_SHOWN = 80


@dataclass(frozen=True)
class Missing:
    """A part that a rendering lacks."""

    message: int | None  # number of the message; None for a tool of the conversation
    what: str  # kind of part: text, reasoning, call, argument or tool
    text: str  # the part itself

    def __str__(self) -> str:
        where = "" if self.message is None else f" of message {self.message}"
        return f"the {self.what}{where}: {self.text[:_SHOWN]!r}{' ...' if len(self.text) > _SHOWN else ''}"


@dataclass
class Shown:
    """Places of a conversation in its rendering."""

    # where the first part of each message begins and its last part ends; equal where a message says nothing
    spans: list[tuple[int, int]]
    dropped: int = 0  # turns whose reasoning the template leaves out


def missing_part(
    text: str,
    starts: Sequence[int | None],
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] = (),
    special: re.Pattern[str] | None = None,
    *,
    passed_over: Collection[str] = (),
) -> Missing | Shown:
    """Return the first part that a rendering lacks, or where the parts are.

    Args:
        starts: where each message begins, as in :class:`~hone.data.template_limits.Trace`; all None where that is not known, and
            the parts are then looked for in the order of the messages.
        tools: function schemas that the rendering shows.
        special: special tokens. A short text is not looked for in them, but for one that has their names.
        passed_over: roles whose messages may lack any part.
    """
    if special is not None:
        without = missing_part(without_tokens(text, special), starts, messages, tools, passed_over=passed_over)
        if isinstance(without, Shown):
            return without
    shown, cursor = Shown([]), 0
    known = any(start is not None for start in starts)
    systems: list[int] = []
    for number, message in enumerate(messages):
        begin, end = _region(starts, number, len(text)) if known else (cursor, len(text))
        regions = [(begin, end)]
        if message["role"] == "tool":  # templates show results within the turn that called, or all in one turn
            caller = next((n for n in range(number, -1, -1) if messages[n]["role"] == "assistant"), 0)
            first, until = _of_calls(starts, messages, number, len(text)) if known else (0, len(text))
            regions += [(shown.spans[caller][1] if caller < number else first, until), (first, until)]
        shown_at = _places(text, message, regions)
        if message["role"] in ("system", "developer") and (isinstance(shown_at, Missing) or not known):
            systems.append(number)  # it may be anywhere, but not in what others say
            shown_at = [], 0
        if isinstance(shown_at, Missing) and shown_at.what == "reasoning" and number + 1 < len(messages):
            shown_at = _places(text, message, regions, reasoning=False)
        if isinstance(shown_at, Missing) and message["role"] in passed_over:
            shown_at = [], 0
        if isinstance(shown_at, Missing):
            return Missing(number, shown_at.what, shown_at.text)
        content = message.get("content")
        if isinstance(content, list) and content and str(content) in text:
            return Missing(number, "text", texts_of(content)[0] if texts_of(content) else str(content))
        places, dropped = shown_at
        shown.dropped += dropped
        reached = [at for at in places if at[0] < at[1]] or [(begin, begin)]
        shown.spans.append((min(at for at, _ in reached), max(at for _, at in reached)))
        if not known and message["role"] not in ("system", "developer"):
            cursor = max(cursor, shown.spans[-1][1])
    rest = list(text)
    for first, end in shown.spans:
        rest[first:end] = " " * (end - first)
    outside = "".join(rest)
    for number in systems:
        shown_at = _places(outside, messages[number], [(0, len(outside))])
        if isinstance(shown_at, Missing):
            return Missing(number, shown_at.what, shown_at.text)
        reached = [at for at in shown_at[0] if at[0] < at[1]] or [(0, 0)]
        shown.spans[number] = min(at for at, _ in reached), max(at for _, at in reached)
        outside = (
            outside[: shown.spans[number][0]]
            + " " * (shown.spans[number][1] - shown.spans[number][0])
            + outside[shown.spans[number][1] :]
        )
    for tool in tools:  # they are shown outside of what the messages say
        for part in _parts_of_tool(tool):
            if _find(outside, part, 0, len(outside)) is None:
                return Missing(None, "tool", part)
    return shown


Place = tuple[int, int]


def _places(
    text: str, message: Mapping[str, Any], regions: Sequence[Place], *, reasoning: bool = True
) -> tuple[list[Place], int] | Missing:
    """Return where the parts of a message are, and how often its reasoning is left out; or the first part that is missing.

    Args:
        regions: spans to look in, the likeliest first.
        reasoning: False to let reasoning be missing.
    """
    places: list[Place] = []
    dropped = 0
    for what, part in _parts(message):
        place = next((at for region in regions if (at := _find(text, part, *region)) is not None), None)
        if place is not None:
            places.append(place)
        elif what == "reasoning" and not reasoning:
            dropped = 1
        else:
            return Missing(None, what, part)
    calls = list(message.get("tool_calls") or ())
    begin, end = regions[0]
    said = places[-1] if places else (begin, begin)
    shown_at = _places_of_calls(text, calls, said, (begin, end))  # words may name the tool that is called
    if isinstance(shown_at, Missing) and places:
        first = _places_of_calls(text, calls, (begin, begin), (begin, end))  # and a call may have the words
        if not isinstance(first, Missing):
            kept = list(text)
            for start, stop in first:
                kept[start:stop] = " " * (stop - start)
            words = _places("".join(kept), {**message, "tool_calls": None}, regions, reasoning=reasoning)
            return words if isinstance(words, Missing) else ([*words[0], *first], words[1])
    return shown_at if isinstance(shown_at, Missing) else ([*places, *shown_at], dropped)


def _places_of_calls(text: str, calls: Sequence[Any], said: Place, region: Place) -> list[Place] | Missing:
    """Return where calls are: one after another, after the words of the message or before them; or what is missing."""
    after, before = (said[1], region[1]), (region[0], said[0])
    places = []
    for call in calls:
        place = _find_call(text, call, *after)
        if isinstance(place, Missing) and not isinstance(earlier := _find_call(text, call, *before), Missing):
            place = earlier
            before = (place[1], before[1])
        elif isinstance(place, Missing):
            return place
        else:
            after = (place[1], region[1])
        places.append(place)
    return places


def without_tokens(text: str, special: re.Pattern[str]) -> str:
    """Return a text of the same length without its special tokens, and without marks that look like one."""
    return _MARK.sub(_blank, special.sub(_blank, text))


def _blank(token: re.Match[str]) -> str:
    return "\0" * len(token[0])


def said_within(text: str, message: Mapping[str, Any], special: re.Pattern[str] | None = None) -> int | None:
    """Return where the last part of a message ends in a text; None if the text lacks one, reasoning set aside."""
    plain = {key: value for key, value in message.items() if key not in THOUGHT_KEYS}
    # before another message, reasoning may be left out
    shown = missing_part(text, [0, len(text)], [plain, {"role": "user", "content": ""}], special=special)
    return shown.spans[0][1] if isinstance(shown, Shown) else None


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
    for text in texts_of(message.get("content")):
        thought = _THOUGHT.match(text) if message.get("role") == "assistant" else None
        if thought is not None:
            yield "reasoning", thought[1]
        rest = text[thought.end() :] if thought is not None else text
        # a mark of reasoning that nothing opened: templates may write white space around it
        pieces = THOUGHT_MARK.split(rest) if thought is None and message.get("role") == "assistant" else [rest]
        yield from (("text", piece) for piece in pieces)


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
        yield str(function.get("description") or "")
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        for name, schema in properties.items() if isinstance(properties, Mapping) else ():
            yield str(name)
            yield str(schema.get("description") or "") if isinstance(schema, Mapping) else ""


def _find(text: str, part: str, begin: int, end: int) -> tuple[int, int] | None:
    """Return where a part is in a span of the rendering, or None. A part without text is at the begin."""
    part = part.strip()
    forms = (part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1], part.replace("'", "\\'"))
    for form in dict.fromkeys(forms):
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
    name, arguments = str(function.get("name") or ""), function.get("arguments", function.get("parameters"))
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
