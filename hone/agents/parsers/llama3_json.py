"""Parser of calls written as a bare JSON object: Llama 3.1 and 3.3."""

from __future__ import annotations

import re

from hone.agents.parsers.base import TOOL_PARSERS, Lexed, ParsedCall, Schemas, ToolParser, json_end, named_object

_KEYS = ("parameters", "arguments")
_LOOKS_LIKE_A_CALL = re.compile(r'\A\s*\{\s*"(?:name|type)"\s*:.*"(?:parameters|arguments)"\s*:', re.DOTALL)


@TOOL_PARSERS.register("llama3_json")
class Llama3JsonParser(ToolParser):
    """Parser of ``{"name": "f", "parameters": {"x": 1}}`` as a whole turn, after ``<|python_tag|>`` or without; ``;`` separates several.

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
