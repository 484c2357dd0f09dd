"""Parser of Kimi K2's tool calls, whose ids the model writes."""

from __future__ import annotations

from hone.agents.parsers.base import TOOL_PARSERS
from hone.agents.parsers.sections import SectionParser


@TOOL_PARSERS.register("kimi")
class KimiParser(SectionParser):
    """Parser of ``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>`` in a section of calls.

    ``functions.f:0`` is the call's id, which the answering tool message repeats.
    """

    marks = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    )

    def read(self, head: str, arguments: str) -> tuple[str, str, str | None]:
        """Return name, arguments and id; the head is the id, which contains the name."""
        name = head.removeprefix("functions.")
        return name.rpartition(":")[0] or name, arguments, head or None
