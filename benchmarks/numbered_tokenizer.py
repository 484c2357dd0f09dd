"""A tokenizer of a random model: token 7 is the word "7"."""

from __future__ import annotations

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def numbered_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with ``size`` tokens."""
    words = models.WordLevel({str(number): number for number in range(size)}, "0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
