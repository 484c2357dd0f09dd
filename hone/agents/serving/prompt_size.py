"""Bound on the text of a prompt, checked before it is tokenized."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.serving.errors import too_long

_USUAL_CHARACTERS = 8
"""Characters per token below which a text is tokenized at once; text of people has about 4."""
_PIECE = 2**16
"""Characters of a piece of a longer text."""


class PromptSize:
    """Refuses text that cannot fit in the context, without tokenizing all of it.

    A token stands for at most as many characters as its name in the vocabulary. So a text of more characters than ``max_tokens``
    such tokens cannot fit. Most tokens are shorter than the longest one: a text that passes and is unusually long is tokenized piece
    by piece, and refused at twice the context length, which is more than the cuts can add.

    Args:
        tokenizer: of the model.
        max_tokens: context length.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    @cached_property
    def max_characters(self) -> int:
        """Maximum of characters in a prompt."""
        return self._max_tokens * max(map(len, self._tokenizer.get_vocab()))

    def check(self, texts: Iterable[str], param: str) -> None:
        """Check that texts fit in one prompt together.

        Args:
            texts: of the prompt.
            param: field of the request.

        Raises:
            ApiError: they cannot fit.
        """
        texts = list(texts)
        characters = sum(map(len, texts))
        if characters > self.max_characters:
            raise too_long(f"{characters} characters", self._max_tokens, param)
        if characters > _USUAL_CHARACTERS * self._max_tokens:
            self._count(texts, param)

    def _count(self, texts: list[str], param: str) -> None:
        tokens = 0
        for text in texts:
            for start in range(0, len(text), _PIECE):
                encoded: Any = self._tokenizer(text[start : start + _PIECE], add_special_tokens=False)
                tokens += len(encoded["input_ids"])
                if tokens > 2 * self._max_tokens:
                    raise too_long(f"more than {tokens // 2} tokens", self._max_tokens, param)
