"""Formats in which models write tool calls: :data:`TOOL_PARSERS` by name, each an implementation of :class:`ToolParser`."""

from __future__ import annotations

from hone.agents.parsers import deepseek, gemma, harmony, hermes, kimi, llama3_json, pythonic, qwen3_coder
from hone.agents.parsers.base import TOOL_PARSERS, ToolParser

__all__ = [
    "TOOL_PARSERS",
    "ToolParser",
    "deepseek",
    "gemma",
    "harmony",
    "hermes",
    "kimi",
    "llama3_json",
    "pythonic",
    "qwen3_coder",
]
