"""Comparing what was played with what a template would show."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

_SHOWN = 40
_BACK = 20
EMPTY_THOUGHTS = re.compile(r"<think>\s*</think>\s*|<\|channel>thought\s*<channel\|>\s*")


@dataclass(frozen=True)
class Difference:
    """Where the tokens of a conversation and a fresh rendering of its messages part.

    Attributes:
        kind: ``tokenization`` (the same text in other tokens), ``strippable`` (white space, empty thoughts or marks of a turn's end only) or ``text``.
        position: the first token that differs.
        played: text from there on, as it was played.
        rendered: text from there on, as the template would have it.
    """

    kind: Literal["tokenization", "strippable", "text"]
    position: int
    played: str
    rendered: str


def compare(
    tokenizer: PreTrainedTokenizerBase, played: list[int], rendered: list[int], closers: Sequence[str]
) -> Difference | None:
    """Return the first difference, None when ``played`` is what is rendered, up to what ends the last turn."""
    position = next(
        (at for at, (a, b) in enumerate(zip(played, rendered, strict=False)) if a != b), min(len(played), len(rendered))
    )
    a, b = (str(tokenizer.decode(ids[position:])) for ids in (played, rendered))
    if position == min(len(played), len(rendered)) and not _essence(a + b, closers):
        return None
    whole = [str(tokenizer.decode(ids)) for ids in (played, rendered)]
    kind: Literal["tokenization", "strippable", "text"] = "text"
    if whole[0].rstrip() == whole[1].rstrip():
        kind = "tokenization"
    elif _essence(whole[0], closers) == _essence(whole[1], closers):
        kind = "strippable"
    return Difference(kind, position, a[:_SHOWN], b[:_SHOWN])


def _essence(text: str, closers: Sequence[str]) -> str:
    """The text without white space, marks of a turn's end, and blocks of thoughts with nothing in them."""
    text = EMPTY_THOUGHTS.sub("", text)
    for closer in closers:
        text = text.replace(closer, "")
    return "".join(text.split())


def rewritten(before: str, after: str, played: str | None, closers: Sequence[str]) -> str | None:
    """Return how a rendering changes earlier turns, or None when it only appends.

    Args:
        before: rendering of the conversation so far.
        after: rendering with the new messages.
        played: the text that the model really saw and wrote; where ``after`` begins with it nothing is lost, whatever ``before`` is.
        closers: tokens that end a turn; what a rendering has behind the last of them is not yet said.

    A block of thoughts with nothing in it counts as none: some templates put one before the last answer only, to tell that it is
    to be given without thinking.
    """
    before, after = EMPTY_THOUGHTS.sub("", before), EMPTY_THOUGHTS.sub("", after)
    said = _up_to_end(before, closers)
    if after.startswith(said):
        return None
    if played is not None and after.startswith(_without_end(EMPTY_THOUGHTS.sub("", played), closers)):
        return None
    position = len(os.path.commonprefix([said, after]))
    position = max(position - _BACK, *(said.rfind(edge, 0, position) for edge in "<\n "), 0)
    return (
        f"the chat template renders earlier turns otherwise once later messages follow: "
        f"{said[position : position + _SHOWN]!r} becomes {after[position : position + _SHOWN]!r} (character {position})"
    )


def _up_to_end(text: str, closers: Sequence[str]) -> str:
    end = max((text.rfind(closer) for closer in closers), default=-1)
    return text.rstrip() if end < 0 else text[:end]


def _without_end(text: str, closers: Sequence[str]) -> str:
    text = text.rstrip()
    for closer in closers:
        text = text.removesuffix(closer)
    return text
