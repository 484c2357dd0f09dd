"""Comparison of played tokens with a fresh rendering of the conversation."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from hone.data.tokenizer import decoded

_SHOWN_CHARACTERS = 40
_CONTEXT_CHARACTERS = 20
EMPTY_THOUGHTS = re.compile(r"<think>\s*</think>\s*|<\|channel>thought\s*<channel\|>\s*")


@dataclass(frozen=True)
class Difference:
    """First difference between a conversation's tokens and a fresh rendering of its messages."""

    # ``tokenization`` (same text, other tokens), ``strippable`` (white space, empty thoughts or end marks) or ``text``
    kind: Literal["tokenization", "strippable", "text"]
    position: int  # index of the first token that differs
    played: str  # text from there on as played
    rendered: str  # text from there on as the template renders it


def compare(
    tokenizer: PreTrainedTokenizerBase, played: list[int], rendered: list[int], closers: Sequence[str]
) -> Difference | None:
    """Return the first difference, or None if both agree except for the end of the last turn."""
    position = next(
        (at for at, (a, b) in enumerate(zip(played, rendered, strict=False)) if a != b), min(len(played), len(rendered))
    )
    a, b = (decoded(tokenizer, ids[position:]) for ids in (played, rendered))
    if position == min(len(played), len(rendered)) and not _normalized(a + b, closers):
        return None
    whole = [decoded(tokenizer, ids) for ids in (played, rendered)]
    kind: Literal["tokenization", "strippable", "text"] = "text"
    if whole[0].rstrip() == whole[1].rstrip():
        kind = "tokenization"
    elif _normalized(whole[0], closers) == _normalized(whole[1], closers):
        kind = "strippable"
    return Difference(kind, position, a[:_SHOWN_CHARACTERS], b[:_SHOWN_CHARACTERS])


def _normalized(text: str, closers: Sequence[str]) -> str:
    """Return the text without white space, end-of-turn marks and empty reasoning blocks."""
    text = EMPTY_THOUGHTS.sub("", text)
    for closer in closers:
        text = text.replace(closer, "")
    return "".join(text.split())


def rewritten(before: str, after: str, played: str | None, closers: Sequence[str]) -> str | None:
    """Describe how the rendering ``after`` new messages changes earlier turns; return None if it only appends.

    If it begins with what the model saw and wrote (``played``), nothing was rewritten. Text after the last closer is ignored,
    and so is an empty reasoning block: some templates write one before the last answer only, to request one without reasoning.
    """
    before, after = EMPTY_THOUGHTS.sub("", before), EMPTY_THOUGHTS.sub("", after)
    closed_text = _up_to_end(before, closers)
    if after.startswith(closed_text):
        return None
    if played is not None and after.startswith(_without_end(EMPTY_THOUGHTS.sub("", played), closers)):
        return None
    position = len(os.path.commonprefix([closed_text, after]))
    position = max(position - _CONTEXT_CHARACTERS, *(closed_text.rfind(edge, 0, position) for edge in "<\n "), 0)
    return (
        f"the chat template changes earlier turns when messages follow: "
        f"{closed_text[position : position + _SHOWN_CHARACTERS]!r} becomes {after[position : position + _SHOWN_CHARACTERS]!r} (character {position})"
    )


def _up_to_end(text: str, closers: Sequence[str]) -> str:
    end = max((text.rfind(closer) for closer in closers), default=-1)
    return text.rstrip() if end < 0 else text[:end]


def _without_end(text: str, closers: Sequence[str]) -> str:
    text = text.rstrip()
    for closer in closers:
        text = text.removesuffix(closer)
    return text
