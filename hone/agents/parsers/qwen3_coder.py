"""Parser of Qwen 3 Coder's XML calls, whose values are typed by the tool's schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hone.agents.parsers.base import TOOL_PARSERS, Lexed, ParsedCall, Schemas, ToolParser, json_value

_CALL = re.compile(r"\s*<function=(?P<name>[^>\n]*)>(?P<body>.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_FORM = "Write <function=NAME>, then <parameter=KEY> value </parameter> for each argument, then </function>."
_FALLBACK: Mapping[str, Any] = {}


@TOOL_PARSERS.register("qwen3_coder")
class Qwen3CoderParser(ToolParser):
    """Parser of ``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``.

    A value is kept verbatim if the schema says string. Otherwise it is parsed as JSON, and is an error if its type differs from the
    schema. Without a schema, a value that is not valid JSON is a string.
    """

    marks = ("<tool_call>", "</tool_call>")

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        opening, closing = (turn.mark(mark) for mark in self.marks)
        content, calls = [], []
        before, opened, rest = turn.text.partition(opening)
        while opened:
            content.append(before)
            end = _end(rest, closing)
            if end is None:
                calls.append(ParsedCall("", None, opening + rest, "The call is not closed by </tool_call>."))
                return "".join(content), calls
            body, rest = rest[:end], rest[end + len(closing) :]
            calls.append(_call(turn.plain(body), opening + body + closing, schemas))
            before, opened, rest = rest.partition(opening)
        return "".join([*content, before]), calls


def _end(text: str, closing: str) -> int | None:
    """Return the call's end: the first closing mark after ``</function>``, else the first closing mark."""
    match = re.search(rf"</function>\s*(?={re.escape(closing)})", text)
    if match:
        return match.end()
    end = text.find(closing)
    return None if end < 0 else end


def _call(body: str, raw: str, schemas: Schemas) -> ParsedCall:
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
