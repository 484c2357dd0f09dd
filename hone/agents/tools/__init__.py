"""Tools that a policy can call: their base class, loading and execution."""

from hone.agents.tools.base import Tool, ToolError, ToolResult, tool

__all__ = ["Tool", "ToolError", "ToolResult", "tool"]
