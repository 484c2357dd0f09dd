"""Parser of JSON calls between marks: Hermes, Qwen 2.5 and 3, and most generic templates."""

from __future__ import annotations

from hone.agents.parsers.base import TOOL_PARSERS, Lexed, ParsedCall, Schemas, ToolParser, json_end, named_object


@TOOL_PARSERS.register("hermes")
class HermesParser(ToolParser):
    """Parser of ``<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>``, any number of them, with text around.

    A closing mark inside a JSON string does not end the call.
    """

    marks = ("<tool_call>", "</tool_call>")

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        opening, closing = (turn.mark(mark) for mark in self.marks)
        content, calls = [], []
        before, opened, rest = turn.text.partition(opening)
        while opened:
            content.append(before)
            end = json_end(rest)
            if end is None or not rest[end:].lstrip().startswith(closing):
                end = rest.find(closing)
            if end < 0:
                calls.append(ParsedCall("", None, opening + rest, "The call is not closed by </tool_call>."))
                return "".join(content), calls
            after = rest.index(closing, end) + len(closing)
            calls.append(named_object(turn.plain(rest[:end]), opening + rest[:after]))
            rest = rest[after:]
            before, opened, rest = rest.partition(opening)
        return "".join([*content, before]), calls
