"""Formats in which models write tool calls: :data:`TOOL_PARSERS` by name, each an implementation of :class:`ToolParser`."""

from hone.agents.parsers import formats
from hone.agents.parsers.base import TOOL_PARSERS, ToolParser

__all__ = ["TOOL_PARSERS", "ToolParser", "formats"]
