"""Parser of tool calls of DeepSeek V3 and V3.1."""

from __future__ import annotations

import re

from hone.agents.parsers.base import TOOL_PARSERS
from hone.agents.parsers.sections import SectionParser

_FENCED = re.compile(r"\A(?P<name>[^\n]*)\n```json\n(?P<arguments>.*)\n```\s*\Z", re.DOTALL)


@TOOL_PARSERS.register("deepseek")
class DeepSeekParser(SectionParser):
    """Parser of ``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>`` inside a marked list of calls (V3.1).

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
