"""Text of a reply for the client: with special tokens, or as the continuation of an unfinished message."""

from __future__ import annotations

from collections.abc import Sequence

from hone.agents.messages import AssistantTurn
from hone.agents.rendering import Renderer
from hone.agents.serving.service import Service
from hone.agents.serving.session import Prompt

_CONTEXT_TOKENS = 8
"""Tokens before a reply that are decoded with it: some tokenizers drop the first space of a text."""


class ReplyText:
    """Content of a reply.

    Args:
        service: service that decodes.
        renderer: renderer of the call.
        prompt: prompt of the call.
        special_tokens: True to show special tokens, apart from the one that ends the reply.
    """

    def __init__(self, service: Service, renderer: Renderer, prompt: Prompt, *, special_tokens: bool) -> None:
        self._service, self._renderer, self._prompt, self._special_tokens = service, renderer, prompt, special_tokens

    def plain(self, ids: Sequence[int]) -> str:
        """Return the text of a reply as it was sampled."""
        if not self._special_tokens:
            return self._service.decode(ids)
        return self._after_prompt(ids[:-1] if self._renderer.turn_ended(ids) else ids)

    def content(self, ids: Sequence[int], turn: AssistantTurn) -> str:
        """Return the content of a turn parsed from ``ids``."""
        if turn.reasoning is not None or turn.calls:
            return turn.content
        if self._special_tokens:
            return self.plain(ids)
        if not self._prompt.continues:
            return turn.content
        text = self._after_prompt(ids)
        return text[: len(text) - len(text.lstrip())] + turn.content

    def _after_prompt(self, ids: Sequence[int]) -> str:
        """Decode ids as the continuation of the prompt, its first space included."""
        tail = self._prompt.ids[-_CONTEXT_TOKENS:]
        before = self._service.decode(tail, special_tokens=self._special_tokens)
        text = self._service.decode([*tail, *ids], special_tokens=self._special_tokens)
        return text.removeprefix(before)
