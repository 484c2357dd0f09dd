"""The built-in formats in which models write tool calls."""

from __future__ import annotations

import ast
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from hone.agents.parsers.base import (
    TOOL_PARSERS,
    Lexed,
    ParsedCall,
    Schemas,
    ToolParser,
    arguments_of,
    finite,
    json_end,
    json_value,
    named_object,
)
from hone.data.chat import named_tokens


class TaggedParser(ToolParser):
    """Parser of calls between ``<tool_call>`` and ``</tool_call>``, any number of them, with text around."""

    marks = ("<tool_call>", "</tool_call>")

    @abstractmethod
    def end(self, text: str, closing: str) -> int:
        """Return the end of the call that ``text`` begins with, before its closing mark; -1 if it is not closed."""

    @abstractmethod
    def read(self, body: str, raw: str, schemas: Schemas) -> ParsedCall:
        """Parse the text between the marks."""

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        opening, closing = (turn.mark(mark) for mark in self.marks)
        content, calls = [], []
        before, opened, rest = turn.text.partition(opening)
        while opened:
            content.append(before)
            end = self.end(rest, closing)
            if end < 0:
                calls.append(ParsedCall("", None, opening + rest, "The call is not closed by </tool_call>."))
                return "".join(content), calls
            after = rest.index(closing, end) + len(closing)
            calls.append(self.read(turn.plain(rest[:end]), opening + rest[:after], schemas))
            before, opened, rest = rest[after:].partition(opening)
        return "".join([*content, before]), calls


@TOOL_PARSERS.register("hermes")
class HermesParser(TaggedParser):
    """Parser of ``<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>``: Hermes, Qwen 2.5 and 3, most generic templates.

    A closing mark inside a JSON string does not end the call.
    """

    def end(self, text: str, closing: str) -> int:
        end = json_end(text)
        return end if end is not None and text[end:].lstrip().startswith(closing) else text.find(closing)

    def read(self, body: str, raw: str, schemas: Schemas) -> ParsedCall:
        return named_object(body, raw)


_CALL = re.compile(r"\s*<function=(?P<name>[^>\n]*)>(?P<body>.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_FORM = "Write <function=NAME>, then <parameter=KEY> value </parameter> for each argument, then </function>."
_FALLBACK: Mapping[str, Any] = {}


@TOOL_PARSERS.register("qwen3_coder")
class Qwen3CoderParser(TaggedParser):
    """Parser of Qwen 3 Coder's ``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``.

    A value is kept verbatim if the schema says string. Otherwise it is parsed as JSON, and is an error if its type differs from the
    schema. Without a schema, a value that is not valid JSON is a string.
    """

    def end(self, text: str, closing: str) -> int:
        """Return the first closing mark after ``</function>``, else the first closing mark."""
        match = re.search(rf"</function>\s*(?={re.escape(closing)})", text)
        return match.end() if match else text.find(closing)

    def read(self, body: str, raw: str, schemas: Schemas) -> ParsedCall:
        return _xml_call(body, raw, schemas)


def _xml_call(body: str, raw: str, schemas: Schemas) -> ParsedCall:
    match = _CALL.match(body)
    if match is None:
        return ParsedCall("", None, raw, f"The call has no <function=...> block. {_FORM}")
    name = match["name"].strip()
    properties = schemas.get(name, _FALLBACK).get("properties") or {}
    arguments: dict[str, Any] = {}
    position, body = 0, match["body"]
    while parameter := _PARAMETER.match(body, position):
        position, key = parameter.end(), parameter["name"].strip()
        value, problem = _typed(_unwrapped(parameter["value"]), properties.get(key))
        if problem is not None:
            return ParsedCall(name, None, raw, f"The parameter '{key}' {problem}.")
        arguments[key] = value
    if body[position:].strip():
        return ParsedCall(name, None, raw, f"The call cannot be read from '{body[position:].strip()[:40]}' on. {_FORM}")
    return ParsedCall(name, arguments, raw)


def _unwrapped(value: str) -> str:
    """Return the value without the line breaks that the format writes around it."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(text: str, schema: Any) -> tuple[Any, str | None]:
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text, None
    value, problem = json_value(text)
    if problem is not None:
        if not kinds or "string" in kinds:
            return text, None
        return None, f"should be {' or '.join(sorted(kinds))}, and is '{text[:40]}'"
    if kinds and not any(isinstance(value, _PYTHON[kind]) for kind in kinds if kind in _PYTHON):
        if "string" in kinds:
            return text, None
        return None, f"should be {' or '.join(sorted(kinds))}, and is '{text[:40]}'"
    return value, None


def _kinds(schema: Any) -> set[str]:
    """Return the JSON types that a property's schema allows; empty without a type."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {str(kind) for kind in kinds}
    return {kind for option in schema.get("anyOf") or schema.get("oneOf") or () for kind in _kinds(option)}


_PYTHON: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


_KEYS = ("parameters", "arguments")
_LOOKS_LIKE_A_CALL = re.compile(r'\A\s*\{\s*"(?:name|type)"\s*:.*"(?:parameters|arguments)"\s*:', re.DOTALL)


@TOOL_PARSERS.register("llama3_json")
class Llama3JsonParser(ToolParser):
    """Parser of ``{"name": "f", "parameters": {"x": 1}}`` as a whole turn (Llama 3.1, 3.3), after ``<|python_tag|>`` or without; ``;`` separates several.

    An answer that is a JSON object, but has no ``name`` with ``parameters``, is content.
    """

    marks = ("<|python_tag|>",)
    closes_calls = False

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        """Return the text before the mark, or all text if it is not a call, and the calls."""
        before, tagged, body = turn.text.partition(turn.mark(self.marks[0]))
        if not tagged:
            before, body = "", turn.text
            if not _LOOKS_LIKE_A_CALL.match(body):
                return body, []
        return before, [named_object(turn.plain(text), text, _KEYS) for text in _objects(body)]


def _objects(text: str) -> list[str]:
    """Split text into JSON objects at semicolons; invalid JSON is kept together with all that follows."""
    objects, rest = [], text.strip()
    while rest:
        end = json_end(rest)
        if end is None:
            return [*objects, rest]
        objects.append(rest[:end])
        after = rest[end:].strip()
        rest = after.removeprefix(";").strip()
        if after and not after.startswith(";"):
            objects[-1] = objects[-1] + rest
            return objects
    return objects


_LOOKS_LIKE_CALLS = re.compile(r"\A\s*\[\s*[A-Za-z_][\w.]*\(")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_MAX_NESTING = 100  # a limit of our own: Python's depends on the depth of the caller and on libraries that raise it


@TOOL_PARSERS.register("pythonic")
class PythonicParser(ToolParser):
    """Parser of ``[f(x=1), g()]`` (Llama 3.2 and 4, ToolACE), between ``<|python_start|>`` and ``<|python_end|>`` or without them.

    Values are literals; nothing is evaluated. Positional arguments get the schema's names in order.
    """

    marks = ("<|python_start|>", "<|python_end|>")
    closes_calls = False

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        """Return the text before the marks, or all text if it is not a call, and the calls."""
        opening, closing = (turn.mark(mark) for mark in self.marks)
        before, tagged, body = turn.text.partition(opening)
        if not tagged:
            before, body = "", turn.text
            if not _LOOKS_LIKE_CALLS.match(body):
                return body, []
        source = turn.plain(body.partition(closing)[0]).strip()
        try:
            tree = ast.parse(source, mode="eval").body
            _check_nesting(tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return before, [
                ParsedCall("", None, source, f"The calls are not valid Python: {error}. Write [name(key=value)].")
            ]
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return before, [_python_call(call, source, schemas) for call in calls]


def _check_nesting(tree: ast.expr) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(_MAX_NESTING):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ValueError(f"more than {_MAX_NESTING} levels of nesting")


def _python_call(node: ast.expr, source: str, schemas: Schemas) -> ParsedCall:
    raw = ast.get_source_segment(source, node) or source
    if not isinstance(node, ast.Call):
        return ParsedCall("", None, raw, "This is not a function call. Write [name(key=value)].")
    name = ast.unparse(node.func)
    names = list(schemas.get(name, _FALLBACK).get("properties") or {})
    if len(node.args) > len(names):
        return ParsedCall(name, None, raw, "Arguments need names: write name(key=value).")
    given = [*zip(names, node.args, strict=False), *((keyword.arg, keyword.value) for keyword in node.keywords)]
    arguments: dict[str, Any] = {}
    for key, value in given:
        if key is None or key in arguments:
            return ParsedCall(name, None, raw, "Each argument must be given once, by name.")
        try:
            arguments[key] = _json_form(ast.literal_eval(_JsonNames().visit(value)))
        except (ValueError, TypeError, RecursionError, MemoryError):
            return ParsedCall(name, None, raw, f"The value of '{key}' is not a literal: {ast.unparse(value)[:40]}.")
    return ParsedCall(name, arguments, raw)


class _JsonNames(ast.NodeTransformer):
    """Replace the JSON names ``true``, ``false`` and ``null``, which models mix in, by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _json_form(value: Any) -> Any:
    """Convert a literal to its JSON form; ValueError for what JSON has not: bytes, sets, infinite numbers, other keys than strings."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("JSON has no infinite numbers")
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("keys must be strings")
        return {key: _json_form(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_form(item) for item in value]
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{type(value).__name__} has no JSON form")
    return value


def blocks(text: str, begin: str, end: str) -> Iterator[tuple[str, bool]]:
    """Yield each text between ``begin`` and ``end``, and whether it was closed; skip text outside."""
    _, opened, rest = text.partition(begin)
    while opened:
        body, closed, after = rest.partition(end)
        yield body, bool(closed)
        _, opened, rest = after.partition(begin)


class SectionParser(ToolParser):
    """Parser of calls between marks inside one section.

    ``marks`` are the begin and end of the section, the begin and end of a call, and the separator of a call's head and arguments.
    """

    section: ClassVar[str] = "section"

    @abstractmethod
    def read(self, head: str, arguments: str) -> tuple[str, str, str | None]:
        """Return name, arguments and id (None without one) of a call."""

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        begin_all, end_all, begin, end, separator = (turn.mark(mark) for mark in self.marks)
        content, opened, rest = turn.text.partition(begin_all)
        if not opened:
            return content, []
        within, _, after = rest.partition(end_all)
        calls = []
        for body, closed in blocks(within, begin, end):
            head, _, tail = (turn.plain(part) for part in body.partition(separator))
            name, arguments, id = self.read(head.strip(), tail if closed else "")
            raw = turn.plain(begin + body + (end if closed else ""))
            if closed:
                calls.append(arguments_of(name, arguments, raw, id=id))
            else:
                calls.append(ParsedCall(name, None, raw, f"The call is not closed by {self.marks[3]}.", id))
        return content + after, calls or [
            ParsedCall("", None, opened + rest, f"The {self.section} has no {self.marks[2]}.")
        ]


_FENCED = re.compile(r"\A(?P<name>[^\n]*)\n```json\n(?P<arguments>.*)\n```\s*\Z", re.DOTALL)


@TOOL_PARSERS.register("deepseek")
class DeepSeekParser(SectionParser):
    """Parser of ``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>`` inside a marked list of calls (DeepSeek V3.1).

    V3 and R1 write ``function<｜tool▁sep｜>f`` and write the arguments as a fenced JSON block; both forms are parsed.
    """

    marks = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )

    section = "list of calls"

    def read(self, head: str, arguments: str) -> tuple[str, str, str | None]:
        """Return name and arguments; the head is the name, or ``function`` with the name before a fenced block."""
        fenced = _FENCED.match(arguments) if head == "function" else None
        return (fenced["name"].strip(), fenced["arguments"], None) if fenced else (head, arguments, None)


@TOOL_PARSERS.register("kimi")
class KimiParser(SectionParser):
    """Parser of ``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>`` in a section of calls (Kimi K2).

    ``functions.f:0`` is the call's id, which the answering tool message repeats.
    """

    marks = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    )

    def read(self, head: str, arguments: str) -> tuple[str, str, str | None]:
        """Return name, arguments and id; the head is the id, which contains the name."""
        name = head.removeprefix("functions.")
        return name.rpartition(":")[0] or name, arguments, head or None


_BARE_CALL = re.compile(r"\s*call:(?P<name>[\w.\-]+)\s*(?=\{)")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_KEY = re.compile(r"[^:{}\[\],]+")
_WORDS = {"true": True, "false": False, "null": None, "None": None}
_MAX_DEPTH = 64


@TOOL_PARSERS.register("gemma")
class GemmaParser(ToolParser):
    """Parser of ``<|tool_call>call:f{x:1,text:<|"|>a<|"|>}<tool_call|>`` (Gemma 4); FunctionGemma has other marks.

    Reasoning is between ``<|channel>thought`` and ``<channel|>``.
    """

    marks = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
    thoughts = ("<|channel>", "<channel|>")
    _function_gemma = ("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if tokenizer is not None and self._function_gemma[0] in named_tokens(tokenizer):
            self.marks = self._function_gemma  # type: ignore[misc]
        super().__init__(tokenizer)

    def split_thoughts(self, turn: Lexed, thinking: bool | None) -> tuple[str | None, str]:
        """Return the reasoning without the channel's name (None without any) and the rest."""
        thoughts, rest = super().split_thoughts(turn, thinking)
        if thoughts is not None:
            thoughts = thoughts.removeprefix("thought").lstrip("\n") or None
        return thoughts, rest

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        """Return the text outside the calls, and the calls; the mark that requests their results is removed."""
        begin, end, quote, response = (turn.mark(mark) for mark in self.marks)
        text = turn.text.removesuffix(response)
        content, opened, rest = text.partition(begin)
        if not opened:
            return content, []
        calls = []
        for body, closed in blocks(opened + rest, begin, end):
            raw = turn.plain(begin + body + (end if closed else ""))
            if closed:
                calls.append(_bare_call(body, quote, raw))
            else:
                calls.append(ParsedCall("", None, raw, f"The call is not closed by {self.marks[1]}."))
        after = rest.rpartition(end)[2] if end in rest else ""
        return content + after, calls


def _bare_call(body: str, quote: str, raw: str) -> ParsedCall:
    match = _BARE_CALL.match(body)
    if match is None:
        return ParsedCall("", None, raw, "The call does not begin with call:NAME{.")
    reader = _Reader(body, match.end(), quote)
    try:
        arguments = reader.value()
        reader.expect_end()
    except _Unreadable as error:
        return ParsedCall(match["name"], None, raw, f"The arguments cannot be read: {error}.")
    return ParsedCall(match["name"], arguments, raw)


class _Unreadable(Exception):
    """Error with the position and reason of invalid notation."""


class _Reader:
    """Recursive-descent reader of the notation's values."""

    def __init__(self, text: str, position: int, quote: str) -> None:
        self._text, self._at, self._quote, self._depth = text, position, quote, 0

    def value(self) -> Any:
        self._skip()
        if self._take(self._quote):
            return self._string()
        if self._take("{"):
            return self._nested(self._object)
        if self._take("["):
            return self._nested(self._list)
        number = _NUMBER.match(self._text, self._at)
        if number:
            self._at = number.end()
            return self._number(number[0], whole=not (number[1] or number[2]))
        for word, value in _WORDS.items():
            if self._take(word):
                return value
        raise _Unreadable(f"a value is expected at character {self._at}")

    def expect_end(self) -> None:
        self._skip()
        if self._at != len(self._text):
            raise _Unreadable(f"text after the arguments, at character {self._at}")

    def _nested(self, read: Any) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _Unreadable(f"values are nested more than {_MAX_DEPTH} deep")
        value = read()
        self._depth -= 1
        return value

    def _object(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self._closes("}", first=not values):
            key = self._key()
            if key in values:
                raise _Unreadable(f"'{key}' is given twice")
            if not self._take(":"):
                raise _Unreadable(f"':' is expected after '{key}', at character {self._at}")
            values[key] = self.value()
        return values

    def _list(self) -> list[Any]:
        values: list[Any] = []
        while not self._closes("]", first=not values):
            values.append(self.value())
        return values

    def _closes(self, bracket: str, *, first: bool) -> bool:
        """Return whether the bracket closes here; otherwise consume the comma before the next value."""
        self._skip()
        if self._take(bracket):
            return True
        if not first and not self._take(","):
            raise _Unreadable(f"',' or '{bracket}' is expected at character {self._at}")
        return False

    def _number(self, text: str, *, whole: bool) -> int | float:
        try:
            return int(text) if whole else finite(text)
        except ValueError as error:  # too long or too large
            raise _Unreadable(f"{text[:40]} is not a number") from error

    def _key(self) -> str:
        self._skip()
        if self._take(self._quote):
            return self._string()
        match = _KEY.match(self._text, self._at)
        if match is None:
            raise _Unreadable(f"a key is expected at character {self._at}")
        self._at = match.end()
        return match[0].strip()

    def _string(self) -> str:
        end = self._text.find(self._quote, self._at)
        if end < 0:
            raise _Unreadable(f"the string at character {self._at} is not closed")
        text, self._at = self._text[self._at : end], end + len(self._quote)
        return text

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _skip(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1


_RECIPIENT = re.compile(r"\bto=(\S+)")


class _HarmonyMessage(NamedTuple):
    """Message of a turn: header, body, and the mark that ended it ("" for none)."""

    header: str
    body: str
    ending: str


@TOOL_PARSERS.register("harmony")
class HarmonyParser(ToolParser):
    """Parser of ``<|channel|>commentary to=functions.f<|message|>{...}<|call|>``, a message of a turn.

    The channel ``analysis`` is reasoning; ``final`` is content, and so is ``commentary`` without a recipient. A message with a
    recipient is a call; the recipient may be before or after the channel's name.
    """

    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
    thoughts = ("<|channel|>analysis", "<|end|>")

    def settled(self, output: Sequence[int]) -> list[int]:
        """Return the tokens of an unfinished turn without the header of a message that has no body yet."""
        body = self._characters.get("<|message|>")
        endings = {self._characters.get(mark) for mark in ("<|end|>", "<|return|>", "<|call|>")}
        for place in reversed(range(len(output))):
            character = self._by_id.get(output[place])
            if character is not None and character == body:
                return list(output)
            if character is not None and character in endings:
                return list(output[: place + 1])
        return []

    def split_thoughts(self, turn: Lexed, thinking: bool | None) -> tuple[str | None, str]:
        """Return the text of the analysis channel (None without any) and the turn."""
        thoughts = [
            message.body
            for message in _messages(turn)
            if _channel(turn, message) == "analysis" and not _recipient(message)
        ]
        return "\n".join(thoughts) if thoughts else None, turn.text

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        """Return the text of the channels for the user, and the calls."""
        content, calls = [], []
        for message in _messages(turn):
            recipient = _recipient(message)
            if recipient:
                calls.append(_harmony_call(turn, message, recipient.removeprefix("functions.")))
            elif _channel(turn, message) != "analysis":
                content.append(message.body)
        return "\n".join(content), calls


def _messages(turn: Lexed) -> list[_HarmonyMessage]:
    body_mark, start = turn.mark("<|message|>"), turn.mark("<|start|>")
    endings = [turn.mark(mark) for mark in ("<|end|>", "<|return|>", "<|call|>")]
    splits = re.split("(" + "|".join(re.escape(ending) for ending in endings) + ")", turn.text)
    messages = []
    for text, ending in zip(splits[::2], [*splits[1::2], ""], strict=True):
        header, begun, body = text.partition(body_mark)
        if not begun:
            header, body = "", header.removeprefix(start)
        if header or body or begun:
            messages.append(_HarmonyMessage(header, body, turn.plain(ending)))
    return messages


def _channel(turn: Lexed, message: _HarmonyMessage) -> str:
    words = message.header.partition(turn.mark("<|channel|>"))[2].split()
    return words[0] if words else ""


def _recipient(message: _HarmonyMessage) -> str:
    header = re.sub("[\ud800-\udfff]", " ", message.header).replace("<|", " <|")
    match = _RECIPIENT.search(header)
    return match[1] if match else ""


def _harmony_call(turn: Lexed, message: _HarmonyMessage, name: str) -> ParsedCall:
    raw = turn.plain(message.header + turn.mark("<|message|>") + message.body) + message.ending
    if message.ending not in ("<|call|>", "<|end|>"):  # <
        return ParsedCall(name, None, raw, "The call is not ended by <|call|>.")
    return arguments_of(name, turn.plain(message.body).strip() or "{}", raw)
