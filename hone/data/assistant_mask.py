"""Render conversations to token ids and mark the tokens that an assistant wrote.

The whole conversation is rendered and checked (:func:`hone.data.chat.render`). What the model writes in the assistant turn i of
messages m is then the text between two places of that rendering:

start   ``before = render(m[:i], generation prompt)`` is the context from which the model generates the turn. Where it begins the
        rendering, the turn starts at its end. Where the template shows the turn's header differently once it is answered (an opened
        ``<think>``), the turn starts after the part of the header that both have.
end     The end of ``render(m[:i + 1])`` where that begins the rendering; otherwise where the template's loop begins the next
        message. White space after the last special token (the end-of-turn token) does not belong to the turn.

If the template marks assistant text with ``{% generation %}`` and the marks hold all that the turns say, the marks are used instead.
An end-of-sequence token that directly follows a mark is added.

A turn with ``weight: 0`` or ``train: false`` is not learned. Tokens do not cross the start or end of a turn: where one would (a line
break that ends the prompt and one that begins the answer), the two sides are tokenized separately, as in generation.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hone.data.chat import Messages, Rendering, encode_texts, render, render_as_is, special_tokens
from hone.data.proof import holds
from hone.errors import DataError

log = logging.getLogger(__name__)

_QUESTION: Messages = [{"role": "user", "content": "1 + 1 = ?"}]
Span = tuple[int, int]
"""Begin and end in characters of a rendering."""


def render_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    chat_template_kwargs: dict[str, Any] | None = None,
    names: Sequence[str] | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of conversations, and 1 for each token of an assistant turn (end-of-turn token included).

    Args:
        tokenizer: with a chat template.
        conversations: each a list of messages.
        chat_template_kwargs: additional arguments of the template.
        names: source of each conversation, for error messages.

    Returns:
        One ``(input_ids, mask)`` for each conversation, two lists of equal length.

    Raises:
        DataError: no chat template; a conversation without an assistant turn that is learned; a template that leaves out a part of
            a conversation, or does not tell where a turn begins and ends (see the module's docstring).
    """
    names = names or [f"conversation {index}" for index in range(len(conversations))]
    learned = [_learned_turns(messages, name) for messages, name in zip(conversations, names, strict=True)]
    renderings = render(tokenizer, conversations, False, chat_template_kwargs, names)
    dropped = sum(rendering.dropped for rendering in renderings)
    if dropped:
        log.warning("the chat template leaves out the reasoning of %d earlier turns, which is not learned", dropped)
    special = re.compile("|".join(map(re.escape, _texts_of(tokenizer, special_tokens(tokenizer)))) or r"(?!)")
    spans, contexts = [], []
    for rendering, turns, name in zip(renderings, learned, names, strict=True):
        before = _contexts(tokenizer, rendering, chat_template_kwargs)
        its_spans = _spans(tokenizer, rendering, before, chat_template_kwargs, special, name)
        spans.append(_marked(tokenizer, rendering, its_spans, turns) or [its_spans[turn] for turn in turns])
        contexts.append([text for text in before.values() if text and rendering.text.startswith(text)])
    return _tokens(tokenizer, [rendering.text for rendering in renderings], spans, contexts)


def end_of_turn(tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any] | None = None) -> int | None:
    """Return the special token with which the chat template ends an answer; None without template or token."""
    if not tokenizer.chat_template:
        return None
    chat = [*_QUESTION, {"role": "assistant", "content": "2"}]
    try:
        ((ids, mask),) = render_conversations(tokenizer, [chat], kwargs)
    except DataError:
        return None  # of a template for other conversations
    last = max(position for position, learned in enumerate(mask) if learned)
    return ids[last] if ids[last] in special_tokens(tokenizer) else None


def rewritten(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, kwargs: dict[str, Any] | None = None
) -> tuple[int, int, str, str] | None:
    """Return the first turn whose context the whole conversation shows differently from generation.

    The header of the turn itself does not count.

    Returns:
        Number of the message, the first character that differs, the text there in generation and in the whole; None without any.
    """
    (rendering,) = render(tokenizer, [messages], False, kwargs)
    starts = rendering.trace.starts if rendering.trace else [None] * len(messages)
    for number, before in _contexts(tokenizer, rendering, kwargs).items():
        same = len(os.path.commonprefix([before or "", rendering.text]))
        if before is not None and same < len(before) and same < (starts[number] or len(before)):
            return number, same, before[same : same + 40], rendering.text[same : same + 40]
    return None


def _learned_turns(messages: Messages, name: str) -> list[int]:
    """Return the numbers of the assistant messages that are learned."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for number in turns:
        weight = messages[number].get("weight", 1)
        if weight not in (0, 1):
            raise DataError(
                f"message {number} has weight {weight!r}, not 0 or 1",
                where=name,
                why="a message is learned or not; its loss has no other weight",
                fix="write 0 to leave the message out of the loss, 1 to learn it",
                code="R42",
            )
    kept = [n for n in turns if messages[n].get("weight", 1) != 0 and messages[n].get("train", True) is not False]
    if not kept:
        what = f"none of {len(turns)} assistant messages is learned" if turns else "no message has role 'assistant'"
        raise DataError(
            f"{what}, of {len(messages)} messages",
            where=name,
            why="there is no answer to train on",
            fix="add the answer as an assistant message (without weight: 0 or train: false), or remove the row",
        )
    return kept


# ------------------------------------------------------------------------------------------------------ places of the turns


def _contexts(
    tokenizer: PreTrainedTokenizerBase, rendering: Rendering, kwargs: dict[str, Any] | None
) -> dict[int, str | None]:
    """Return the text before each assistant turn, generation prompt included; None where the template refuses it."""
    messages = rendering.messages
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return {number: render_as_is(tokenizer, messages[:number], True, kwargs) for number in turns}


def _spans(
    tokenizer: PreTrainedTokenizerBase,
    rendering: Rendering,
    contexts: dict[int, str | None],
    kwargs: dict[str, Any] | None,
    special: re.Pattern[str],
    name: str,
) -> dict[int, Span]:
    """Return where each assistant turn is."""
    text, messages = rendering.text, rendering.messages
    starts = rendering.trace.starts if rendering.trace else [None] * len(messages)
    traced = any(start is not None for start in starts)
    spans: dict[int, Span] = {}
    reached = 0
    for number, before in contexts.items():
        header_at, following = (
            starts[number],
            next((start for start in starts[number + 1 :] if start is not None), None),
        )
        start = None
        latest = (
            rendering.spans[number][1] if traced else len(text)
        )  # without a trace, a short text may be found too early
        if before is not None and text.startswith(before) and reached <= len(before) <= latest:
            start = len(before)
        elif header_at is not None:
            # the first message has no context that a template renders: its header is that of an answer to a question
            context, wanted = (messages[:number], before) if before is not None else (_QUESTION, None)
            wanted = wanted if wanted is not None else render_as_is(tokenizer, _QUESTION, True, kwargs)
            plain = render_as_is(tokenizer, context, False, kwargs)
            header = wanted.removeprefix(plain) if wanted is not None and plain is not None else ""
            start = header_at + _shared_header(header, text[header_at:])
        if start is None:
            raise _unclear(number, "begins", name)
        said = rendering.spans[number][1] if traced else start
        end = _end(tokenizer, rendering, number, (said, following), kwargs, special)
        if end is None or not reached <= start <= end:
            raise _unclear(number, "ends", name)
        if not holds(text[start:end], messages[number]):
            raise _unclear(number, "begins", name)
        within = next(
            (n for n, (a, b) in enumerate(rendering.spans) if n != number and a < b and start < b and a < end), None
        )
        if traced and within is not None and messages[within]["role"] not in ("system", "developer"):
            raise _within(within, number, messages, name)
        spans[number] = (start, end)
        reached = end
    return spans


def _shared_header(header: str, text: str) -> int:
    """Return the length of the part of a turn's header that a text begins with; a token is shared whole or not at all."""
    shared = os.path.commonprefix([header, text])
    return len(shared) if shared == header else max((shared.rfind(last) + 1 for last in ">]\n"), default=0)


def _end(
    tokenizer: PreTrainedTokenizerBase,
    rendering: Rendering,
    number: int,
    between: tuple[int, int | None],
    kwargs: dict[str, Any] | None,
    special: re.Pattern[str],
) -> int | None:
    """Return where a turn ends, its end-of-turn token included; None where the rendering does not tell.

    ``between``: where the last part of the turn ends (or the turn begins), and where the next message begins if that is known.
    """
    text, (said, following) = rendering.text, between
    if number + 1 == len(rendering.messages):
        closed = rendering.trace.end if rendering.trace else None
        if closed is not None and closed >= said and special.search(text, said, closed):
            return _trimmed(text, said, closed, special)
        return _trimmed(text, said, len(text), special)
    after = render_as_is(tokenizer, rendering.messages[: number + 1], False, kwargs)
    if after is not None and text.startswith(after) and len(after) >= said:
        return _trimmed(text, said, len(after), special)
    if following is not None:
        return _trimmed(text, said, following, special)
    return None


def _trimmed(text: str, said: int, end: int, special: re.Pattern[str]) -> int:
    """Return the end of a turn without the white space that follows its last special token."""
    last = max((match.end() for match in special.finditer(text, said, end)), default=end)
    return end if text[last:end].strip() else last


def _unclear(number: int, what: str, name: str) -> DataError:
    return DataError(
        f"the chat template does not tell where message {number} {what} in the rendering",
        where=name,
        why="which tokens the model learns would be a guess",
        fix="put the assistant's content inside {% generation %} and {% endgeneration %} in the template, set "
        "model.custom_chat_template, or split the conversation so that each row ends with one assistant turn",
    )


def _within(inner: int, outer: int, messages: Messages, name: str) -> DataError:
    return DataError(
        f"the chat template shows message {inner} (role {messages[inner]['role']}) within message {outer}, or before its end",
        where=name,
        why="the model would learn text that it does not write",
        fix="write the turn as the template shows it, such as a call without text, or set model.custom_chat_template",
        code="E-left-out",
    )


def _marked(
    tokenizer: PreTrainedTokenizerBase, rendering: Rendering, spans: dict[int, Span], turns: list[int]
) -> list[Span] | None:
    """Return the spans that the template marks in the turns; None without marks, or where they lack a part of a turn."""
    trace, text = rendering.trace, rendering.text
    if trace is None or not trace.marks:
        return None
    marks, starts = [mark for mark in trace.marks if mark[1] > mark[0]], trace.starts
    end, kept = str(tokenizer.eos_token or ""), []
    for number in turns:
        first = spans[number][0] if starts[number] is None else min(starts[number] or 0, spans[number][0])
        within = [(a, b) for a, b in marks if first <= a and b <= max(spans[number][1], rendering.spans[number][1])]
        if not holds("".join(text[a:b] for a, b in within), rendering.messages[number]):
            return None
        kept += [
            (a, b + len(end) if end and text.startswith(end, b) and not text[a:b].endswith(end) else b)
            for a, b in within
        ]
    return kept


# ------------------------------------------------------------------------------------------------------------------ tokens


def _tokens(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], spans: list[list[Span]], contexts: list[list[str]]
) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of texts, and 1 for those within the spans; no token crosses the start or end of one."""
    fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    encoded: Any = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True) if fast else None
    prefixes = iter(encode_texts(tokenizer, list(itertools.chain.from_iterable(contexts))))
    rendered = []
    for number, (text, marks, before) in enumerate(zip(texts, spans, contexts, strict=True)):
        edges = {edge for mark in marks for edge in mark} | {len(prefix) for prefix in before}
        before_ids = list(itertools.islice(prefixes, len(before)))
        if encoded is not None:
            ids, offsets = list(encoded["input_ids"][number]), encoded["offset_mapping"][number]
            crossed = any(a < edge < b for a, b in offsets for edge in edges)
            if not crossed and all(ids[: len(prefix)] == prefix for prefix in before_ids):
                rendered.append((ids, [int(any(a <= x and y <= b for a, b in marks)) for x, y in offsets]))
                continue
        cuts = sorted({0, len(text), *edges})
        chunks = encode_texts(tokenizer, [text[a:b] for a, b in itertools.pairwise(cuts)])
        mask = [
            int(any(a <= cut < b for a, b in marks)) for cut, chunk in zip(cuts, chunks, strict=False) for _ in chunk
        ]
        rendered.append(([token for chunk in chunks for token in chunk], mask))
    return rendered


def _texts_of(tokenizer: PreTrainedTokenizerBase, ids: set[int]) -> list[str]:
    """Return the texts of tokens, the longest first."""
    return sorted((str(tokenizer.convert_ids_to_tokens(token)) for token in ids), key=len, reverse=True)
