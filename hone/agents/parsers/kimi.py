"""Calls between the marks of Kimi K2, which writes their ids itself."""

from __future__ import annotations

from hone.agents.parsers.base import TOOL_PARSERS
from hone.agents.parsers.sections import SectionParser


@TOOL_PARSERS.register("kimi")
class KimiParser(SectionParser):
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

    def read(self, head: str, arguments: str) -> tuple[str, str, str | None]:
        """The head is the id, and has the name in it."""
        name = head.removeprefix("functions.")
        return name.rpartition(":")[0] or name, arguments, head or None
