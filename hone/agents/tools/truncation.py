"""Truncation of long tool results to a number of tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_CHARACTERS_PER_TOKEN = 32
"""Characters tokenized per allowed token on either side, so that huge results are not tokenized completely."""


def truncate(text: str, limit: int, side: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Truncate a text to ``limit`` tokens with a mark; also return whether it was truncated.

    Args:
        text: text of any length.
        limit: maximum tokens kept, without the mark.
        side: side to remove: ``left``, ``middle`` or ``right``.
        tokenizer: tokenizer that counts the tokens.
    """
    reach = limit * _CHARACTERS_PER_TOKEN
    if len(text) <= 2 * reach:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= limit:
            return text, False
        head, tail = ids, ids
    else:
        head = tokenizer.encode(text[:reach], add_special_tokens=False)
        tail = tokenizer.encode(text[-reach:], add_special_tokens=False)

    def words(ids: list[int]) -> str:
        return str(tokenizer.decode(ids)).strip("\ufffd")

    if side == "right":
        return f"{words(head[:limit])}...(truncated)", True
    if side == "left":
        return f"(truncated)...{words(tail[-limit:])}", True
    first = (limit + 1) // 2
    last = words(tail[len(tail) - (limit - first) :])
    return f"{words(head[:first])}...(truncated)...{last}", True
