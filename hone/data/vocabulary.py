"""The ids of a tokenizer, and the text of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

_SPACE = "\u2581"
"""Mark of a space in the tokens of SentencePiece, which a tokenizer drops in front of the first token."""


def outside_tokenizer(tokenizer: Any, vocabulary: int) -> Tensor:
    """Return which ids below ``vocabulary`` no token of the tokenizer has, ``[vocabulary]`` bool.

    Embeddings are often padded to a round number. Such an id decodes to nothing.
    """
    outside = torch.ones(vocabulary, dtype=torch.bool)
    outside[[token for token in tokenizer.get_vocab().values() if token < vocabulary]] = False
    return outside


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of every token id from 0; a part of a character is the replacement character, an unused id is empty."""
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    ids = [[number] for number in range(size)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        texts = [str(tokenizer.decode(one)) for one in ids]
    else:
        texts = backend.decode_batch(ids, skip_special_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    return [
        f" {text}" if token is not None and token.startswith(_SPACE) and not text.startswith(" ") else text
        for token, text in zip(tokens, texts, strict=True)
    ]
