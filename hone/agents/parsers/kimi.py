"""Calls between the marks of Kimi K2, which writes their ids itself."""

from __future__ import annotations

from hone.agents.parsers.base import TOOL_PARSERS, Found, Lexed, Schemas, ToolParser, arguments_of
from hone.agents.parsers.sections import blocks


@TOOL_PARSERS.register("kimi")
class KimiParser(ToolParser):
    """``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>`` within a section of calls.

    ``functions.f:0`` is the call's id: the tool message that answers it repeats it.
    """

    marks = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    )

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[Found]]:
        """Return the text outside the section, and the calls within."""
        begin_all, end_all, begin, end, separator = (turn.mark(mark) for mark in self.marks)
        content, opened, rest = turn.text.partition(begin_all)
        if not opened:
            return content, []
        section, _, behind = rest.partition(end_all)
        found = []
        for body, closed in blocks(section, begin, end):
            id, _, arguments = (turn.plain(part) for part in body.partition(separator))
            id, raw = id.strip(), turn.plain(begin + body + (end if closed else ""))
            name = id.removeprefix("functions.").rpartition(":")[0] or id.removeprefix("functions.")
            if closed:
                found.append(arguments_of(name, arguments, raw, id=id or None))
            else:
                found.append(Found(name, None, raw, f"The call is not closed by {self.marks[3]}.", id or None))
        return content + behind, found or [Found("", None, opened + rest, f"The section has no {self.marks[2]}.")]
