"""Parser of calls written as a Python list of function calls: Llama 3.2 and 4, ToolACE."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import Any

from hone.agents.parsers.base import TOOL_PARSERS, Lexed, ParsedCall, Schemas, ToolParser

_LOOKS_LIKE_CALLS = re.compile(r"\A\s*\[\s*[A-Za-z_][\w.]*\(")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_FALLBACK: Mapping[str, Any] = {}


@TOOL_PARSERS.register("pythonic")
class PythonicParser(ToolParser):
    """Parser of ``[f(x=1), g()]``, between ``<|python_start|>`` and ``<|python_end|>`` or without them.

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
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return before, [
                ParsedCall("", None, source, f"The calls are not valid Python: {error}. Write [name(key=value)].")
            ]
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return before, [_call(call, source, schemas) for call in calls]


def _call(node: ast.expr, source: str, schemas: Schemas) -> ParsedCall:
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
