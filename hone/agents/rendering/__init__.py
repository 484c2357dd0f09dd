"""Rendering of conversations to token ids by appending; :func:`renderer_for` returns a tokenizer's :class:`Renderer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.parsers.base import TOOL_PARSERS
from hone.agents.rendering.probes import parser_that_reads, shows_tools
from hone.agents.rendering.renderer import Difference, Renderer, family_called, family_of
from hone.agents.rendering.template import Ending, Template

__all__ = ["TEXT_TOOLS", "Difference", "Ending", "Renderer", "renderer_for"]

TEXT_TOOLS = "text_tools"
"""Name of the renderer that writes tools into message contents, for any family."""


def renderer_for(
    tokenizer: PreTrainedTokenizerBase,
    name: str = "auto",
    *,
    parser: str = "auto",
    template_kwargs: Mapping[str, Any] | None = None,
) -> Renderer:
    """Return the renderer of a tokenizer.

    Args:
        name: a family (``qwen``, ``llama3``, ``gemma``, ``gemma4``, ``harmony``, ``deepseek``, ``kimi``, ``generic``), ``auto``
            (chosen by the vocabulary's tokens), or ``text_tools`` for templates without tools.
        parser: format of tool calls, ``auto`` for the parser that reads the template's calls.
        template_kwargs: extra arguments of the template (``enable_thinking`` and the like).

    Raises:
        DataError: the tokenizer has no chat template.
        ModelError: the tokenizer lacks the tokens of the named family.
    """
    template = Template(tokenizer, template_kwargs)
    if name == TEXT_TOOLS:
        read = TOOL_PARSERS.get("hermes" if parser == "auto" else parser)(tokenizer)
        return Renderer(template, family_of(tokenizer), read, tools_as_text=True)
    family = family_called(name, tokenizer)
    as_text = family.name == "gemma" and not shows_tools(template)  # Gemma 2 and 3
    if parser == "auto":
        parser = "hermes" if as_text else parser_that_reads(template, family.parser)
    return Renderer(template, family, TOOL_PARSERS.get(parser)(tokenizer), tools_as_text=as_text)
