"""Calls in the XML of Qwen 3 Coder, whose values are plain text typed by the tool's schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hone.agents.parsers.base import TOOL_PARSERS, Found, Lexed, Schemas, ToolParser, json_value

_CALL = re.compile(r"\s*<function=(?P<name>[^>\n]*)>(?P<body>.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_FORM = "Write <function=NAME>, then <parameter=KEY> value </parameter> for each argument, then </function>."
_FALLBACK: Mapping[str, Any] = {}


@TOOL_PARSERS.register("qwen3_coder")
class Qwen3CoderParser(ToolParser):
    """``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``, values typed by the tool's schema.

    A value is taken as it stands when the schema says string; otherwise it is read as JSON, and is an error when it is not what
    the schema says. Without a schema, what is no JSON is a string.
    """

    marks = ("<tool_call>", "</tool_call>")

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[Found]]:
        """Return the text outside the marks, and the calls between them."""
        opening, closing = (turn.mark(mark) for mark in self.marks)
        content, found = [], []
        before, opened, rest = turn.text.partition(opening)
        while opened:
            content.append(before)
            end = _end(rest, closing)
            if end is None:
                found.append(Found("", None, opening + rest, "The call is not closed by </tool_call>."))
                return "".join(content), found
            body, rest = rest[:end], rest[end + len(closing) :]
            found.append(_call(turn.plain(body), opening + body + closing, schemas))
            before, opened, rest = rest.partition(opening)
        return "".join([*content, before]), found


def _end(text: str, closing: str) -> int | None:
    """Where the call ends: at the first closing mark that follows ``</function>``, else at the first one."""
    match = re.search(rf"</function>\s*(?={re.escape(closing)})", text)
    if match:
        return match.end()
    end = text.find(closing)
    return None if end < 0 else end


def _call(body: str, raw: str, schemas: Schemas) -> Found:
    match = _CALL.match(body)
    if match is None:
        return Found("", None, raw, f"The call has no <function=...> block. {_FORM}")
    name = match["name"].strip()
    properties = schemas.get(name, _FALLBACK).get("properties") or {}
    arguments: dict[str, Any] = {}
    position, body = 0, match["body"]
    while parameter := _PARAMETER.match(body, position):
        position, key = parameter.end(), parameter["name"].strip()
        value, wrong = _typed(_unwrapped(parameter["value"]), properties.get(key))
        if wrong is not None:
            return Found(name, None, raw, f"The parameter '{key}' {wrong}.")
        arguments[key] = value
    if body[position:].strip():
        return Found(name, None, raw, f"The call cannot be read from '{body[position:].strip()[:40]}' on. {_FORM}")
    return Found(name, arguments, raw)


def _unwrapped(value: str) -> str:
    """The value without the line break that the format puts before and behind it."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(text: str, schema: Any) -> tuple[Any, str | None]:
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text, None
    value, wrong = json_value(text)
    if wrong is not None:
        if not kinds or "string" in kinds:
            return text, None
        return None, f"should be {' or '.join(sorted(kinds))}, and is '{text[:40]}'"
    if kinds and not any(isinstance(value, _PYTHON[kind]) for kind in kinds if kind in _PYTHON):
        if "string" in kinds:
            return text, None
        return None, f"should be {' or '.join(sorted(kinds))}, and is '{text[:40]}'"
    return value, None


def _kinds(schema: Any) -> set[str]:
    """JSON types that a property's schema allows; none where it says nothing."""
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
