"""Long tool results, cut to a number of tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_LONGEST_TOKEN = 32
"""Characters for each token allowed that are looked at on either side: ten megabytes of result are not tokenized."""


def truncate(text: str, limit: int, side: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Cut a text to ``limit`` tokens, mark where, and say whether it was cut.

    Args:
        text: of any length.
        limit: most tokens kept, the mark not counted.
        side: what is cut away: ``left``, ``middle`` or ``right``.
        tokenizer: counts.
    """
    reach = limit * _LONGEST_TOKEN
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
