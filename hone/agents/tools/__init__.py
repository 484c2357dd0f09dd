"""Tools that a policy can call: what a tool is, where tools come from, and how calls are carried out."""

from hone.agents.tools.base import Tool, ToolError, ToolResult
from hone.agents.tools.functions import tool

__all__ = ["Tool", "ToolError", "ToolResult", "tool"]
