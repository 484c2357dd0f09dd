"""Calls between the marks of DeepSeek V3 and V3.1."""

from __future__ import annotations

import re

from hone.agents.parsers.base import TOOL_PARSERS, Found, Lexed, Schemas, ToolParser, arguments_of
from hone.agents.parsers.sections import blocks

_FENCED = re.compile(r"\A(?P<name>[^\n]*)\n```json\n(?P<arguments>.*)\n```\s*\Z", re.DOTALL)


@TOOL_PARSERS.register("deepseek")
class DeepSeekParser(ToolParser):
    """``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>`` between marks of the whole list (V3.1).

    V3 and R1 write ``function<｜tool▁sep｜>f`` and put the arguments into a fenced block of JSON; both are read.
    """

    marks = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[Found]]:
        """Return the text outside the list of calls, and the calls."""
        begin_all, end_all, begin, end, separator = (turn.mark(mark) for mark in self.marks)
        content, opened, rest = turn.text.partition(begin_all)
        if not opened:
            return content, []
        section, _, behind = rest.partition(end_all)
        found = []
        for body, closed in blocks(section, begin, end):
            name, _, arguments = (turn.plain(part) for part in body.partition(separator))
            raw = turn.plain(begin + body + (end if closed else ""))
            if not closed:
                found.append(Found(name.strip(), None, raw, f"The call is not closed by {self.marks[3]}."))
                continue
            fenced = _FENCED.match(arguments) if name.strip() == "function" else None
            if fenced:
                name, arguments = fenced["name"], fenced["arguments"]
            found.append(arguments_of(name.strip(), arguments, raw))
        return content + behind, found or [Found("", None, opened + rest, f"The list of calls has no {self.marks[2]}.")]
