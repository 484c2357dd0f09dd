"""Calls as a bare JSON object: Llama 3.1 and 3.3."""

from __future__ import annotations

import re

from hone.agents.parsers.base import TOOL_PARSERS, Found, Lexed, Schemas, ToolParser, json_end, named_object

_KEYS = ("parameters", "arguments")
_LOOKS_LIKE_A_CALL = re.compile(r'\A\s*\{\s*"(?:name|type)"\s*:.*"(?:parameters|arguments)"\s*:', re.DOTALL)


@TOOL_PARSERS.register("llama3_json")
class Llama3JsonParser(ToolParser):
    """``{"name": "f", "parameters": {"x": 1}}`` as the whole turn, after ``<|python_tag|>`` or without; several with ``;``.

    An answer that is a JSON object, but has no ``name`` with ``parameters``, is content.
    """

    marks = ("<|python_tag|>",)

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[Found]]:
        """Return the text before the mark, or all of it when it is no call, and the calls."""
        before, tagged, body = turn.text.partition(turn.mark(self.marks[0]))
        if not tagged:
            before, body = "", turn.text
            if not _LOOKS_LIKE_A_CALL.match(body):
                return body, []
        return before, [named_object(turn.plain(text), text, _KEYS) for text in _objects(body)]


def _objects(text: str) -> list[str]:
    """The JSON objects that semicolons divide; what is none stays one piece with all that follows."""
    objects, rest = [], text.strip()
    while rest:
        end = json_end(rest)
        if end is None:
            return [*objects, rest]
        objects.append(rest[:end])
        behind = rest[end:].strip()
        rest = behind.removeprefix(";").strip()
        if behind and not behind.startswith(";"):
            objects[-1] = objects[-1] + rest
            return objects
    return objects
