"""Formats in which models write tool calls: :data:`TOOL_PARSERS` by name, each an implementation of :class:`ToolParser`."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

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
    "parser_for",
    "pythonic",
    "qwen3_coder",
]


def parser_for(tokenizer: PreTrainedTokenizerBase, name: str = "auto") -> ToolParser:
    """Return the parser called ``name``; ``auto`` takes the one that reads what the chat template writes.

    Raises:
        ConfigError: no parser has that name.
    """
    if name == "auto":
        from hone.agents.rendering import renderer_for

        return renderer_for(tokenizer).parser
    return TOOL_PARSERS.get(name)(tokenizer)
