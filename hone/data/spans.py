"""Spans of text that two tokenizers end at the same place, so that their log-probs can be compared.

    policy      "un"  "believ"  "able"  <end>        ends at bytes 2, 8, 12, end of turn
    teacher     "unbel"  "iev"  "able"  <|im_end|>   ends at bytes 5, 8, 12, end of turn
    spans       [un believ | unbel iev]  [able | able]  [<end> | <|im_end|>]

As in TRL's GOLD trainer (Patino et al. 2025, "Unlocking On-Policy Distillation for Any Model Family",
https://huggingface.co/spaces/HuggingFaceH4/on-policy-distillation), which sums log-probs over such spans; universal logit distillation
(Boizard et al. 2024, arXiv:2402.12030) compares sorted probabilities instead, and leaves the text aside.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hone.data.chat import encode_texts

_MARK = "\ufffd"  # text of bytes that are no character


@dataclass(frozen=True)
class Spans:
    """A response in the tokens of a teacher, and the span of each token."""

    teacher_ids: list[int]  # token ids of the teacher, one at least
    policy: list[int]  # number of the span of each token of the policy, from 0
    teacher: list[int]  # number of the span of each token of the teacher, from 0. Every span has tokens of both


def spans_of(
    response: Sequence[int],
    policy: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    stop_token_ids: Collection[int] = (),
) -> Spans:
    """Return the spans of a response.

    The policy's token that ends the turn is one span with the teacher's. A text that the teacher's tokens do not reproduce, or one
    without characters, is a single span.

    Args:
        response: token ids of the policy, one at least.
        teacher: the teacher's tokenizer, with an end-of-sequence token.
        stop_token_ids: tokens of the policy that end a response.
    """
    stopped = response[-1] in stop_token_ids
    body = list(response[:-1] if stopped else response)
    mine = token_bytes(policy, body)
    text = b"".join(mine).decode("utf-8")
    ids = list(encode_texts(teacher, [text])[0]) if text else []
    theirs = token_bytes(teacher, ids)
    ends = aligned_ends(mine, theirs) if ids and b"".join(mine) == b"".join(theirs) else [(len(body), len(ids))]
    if stopped or not ids:
        end = teacher.eos_token_id
        assert isinstance(end, int)
        ids.append(end)
        ends = [*ends, (len(response), len(ids))] if body and len(ids) > 1 else [(len(response), len(ids))]
    return Spans(ids, _numbers([first for first, _ in ends]), _numbers([second for _, second in ends]))


def aligned_ends(one: Sequence[bytes], other: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return how many tokens of each side have ended wherever both end at the same byte, the whole text last.

    >>> aligned_ends([b"un", b"believ", b"able"], [b"unbel", b"iev", b"able"])
    [(2, 2), (3, 3)]

    Args:
        one: bytes of the tokens of a text. Tokens without bytes belong to what follows them.
        other: bytes of other tokens of the same text.
    """
    first, second = _ends(one), _ends(other)
    common = sorted(first.keys() & second.keys())
    ends = [(first[place], second[place]) for place in common[:-1]]
    return [*ends, (len(one), len(other))]


def token_bytes(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[bytes]:
    """Return the bytes of the text that each token adds; together they are valid UTF-8.

    A character whose bytes are in several tokens belongs to them byte by byte, if the tokenizer is of bytes and the text is valid.
    Otherwise it belongs to the last of them.
    """
    if not ids:
        return []
    table = _byte_table(tokenizer)
    if table is not None:
        pieces = [table[token] for token in ids] if all(token in table for token in ids) else []
        if pieces and _is_text(b"".join(pieces)):
            return pieces
    prefixes = [list(ids[: end + 1]) for end in range(len(ids))]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        texts = [str(tokenizer.decode(prefix, skip_special_tokens=False)) for prefix in prefixes]
    else:
        texts = backend.decode_batch(prefixes, skip_special_tokens=False)
    whole, ends = texts[-1], [0]
    for text in texts[:-1]:
        ends.append(max(ends[-1], _shared(text, whole)))
    ends.append(len(whole))
    return [whole[start:end].encode() for start, end in zip(ends, ends[1:], strict=False)]


def shares_tokenizer(policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> bool:
    return policy.get_vocab() == teacher.get_vocab()


def _ends(pieces: Sequence[bytes]) -> dict[int, int]:
    """Return the number of tokens that have ended at each byte where one ends; of several, the fewest."""
    ends: dict[int, int] = {}
    length = 0
    for number, piece in enumerate(pieces, 1):
        length += len(piece)
        if length:
            ends.setdefault(length, number)
    return ends


def _numbers(ends: Sequence[int]) -> list[int]:
    return [span for span, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) for _ in range(start, end)]


def _shared(text: str, whole: str) -> int:
    text = text.rstrip(_MARK)  # perhaps a part of a character
    return next((n for n, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), min(len(text), len(whole)))


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@functools.lru_cache(maxsize=16)
def _byte_table(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes] | None:
    """Return the bytes of every token of a byte-level tokenizer; None for another kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or (json.loads(backend.to_str())["decoder"] or {}).get("type") != "ByteLevel":
        return None
    letters = _letters()
    added = {index: token.content.encode() for index, token in tokenizer.added_tokens_decoder.items()}
    table = {
        index: bytes(letters[letter] for letter in token)
        for token, index in tokenizer.get_vocab().items()
        if index not in added and all(letter in letters for letter in token)
    }
    return table | added


def _letters() -> dict[str, int]:
    """Return the byte that each letter encodes in a byte-level tokenizer (GPT-2)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(others)}
