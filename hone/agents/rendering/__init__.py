"""Rendering of conversations to token ids by appending; :func:`renderer_for` returns a tokenizer's :class:`Renderer`."""

from hone.agents.rendering.renderer import TEXT_TOOLS, Difference, Renderer, renderer_for
from hone.agents.rendering.template import Ending

__all__ = ["TEXT_TOOLS", "Difference", "Ending", "Renderer", "renderer_for"]
