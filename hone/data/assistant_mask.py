"""Render conversations to token ids and mark the tokens that an assistant wrote.

The whole conversation is rendered and checked (:func:`hone.data.chat.render`). What the model writes in the assistant turn i of
messages m is then the text between two places of that rendering:

start   ``before = render(m[:i], generation prompt)`` is the context from which the model generates the turn. Where it begins the
        rendering, the turn starts at its end. Where the template shows the turn's header differently once it is answered (an opened
        ``<think>``), the turn starts after the part of the header that both have.
end     The end of ``render(m[:i + 1])`` where that begins the rendering; otherwise where the template's loop begins the next
        message, or ends. The header of an answer that follows does not belong to the turn, nor does white space after the last
        special token (the end-of-turn token). Where no loop tells, the special tokens after the last place of the turn's words end
        it: reasoning may say the same words.

If the template marks assistant text with ``{% generation %}`` and the marks hold all that the turns say, the marks are used instead,
without the header and the line break that some of them include. An end-of-sequence token that directly follows a mark is added.

A turn with ``weight: 0`` or ``train: false`` is not learned. Tokens do not cross the start or end of a turn: where one would (a line
break that ends the prompt and one that begins the answer), the two sides are tokenized separately, as in generation.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hone.data.chat import Messages, Rendering, encode_texts, render, render_as_is, special_pattern, special_tokens
from hone.data.proof import THOUGHT_MARK, said_within, texts_of, without_tokens
from hone.errors import DataError

_QUESTION: Messages = [{"role": "user", "content": "1 + 1 = ?"}]
Span = tuple[int, int]  # begin and end in characters of a rendering


def render_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    chat_template_kwargs: dict[str, Any] | None = None,
    names: Sequence[str] | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of conversations, and 1 for each token of an assistant turn (end-of-turn token included).

    Returns one ``(input_ids, mask)`` for each conversation, two lists of equal length.

    Raises DataError: no chat template; a conversation without an assistant turn that is learned; a template that leaves out a
    part of a conversation, or does not tell where a turn begins and ends (see the module's docstring).
    """
    names = names or [f"conversation {index}" for index in range(len(conversations))]
    learned = [_learned_turns(messages, name) for messages, name in zip(conversations, names, strict=True)]
    renderings = render(tokenizer, conversations, False, chat_template_kwargs, names)
    special = special_pattern(tokenizer)
    header = _header(tokenizer, _QUESTION, chat_template_kwargs) or ""
    spans, contexts = [], []
    for rendering, turns, name in zip(renderings, learned, names, strict=True):
        before = _contexts(tokenizer, rendering, chat_template_kwargs)
        derived = _Turns(tokenizer, rendering, before, chat_template_kwargs, special, name, header)
        marks = _marked(tokenizer, rendering, special)
        marks = derived.spans() if marks is None else derived.without_headers(marks)
        _check_order(rendering, marks, name)
        spans.append([span for turn in turns for span in marks[turn]])
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

    The header of the turn itself does not count. Returns number of the message, the first character that differs, the
    text there in generation and in the whole; None without any.
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
        for key, wrong in (("weight", "not 0 or 1"), ("train", "not true or false")):
            value = messages[number].get(key, 1)
            if value not in (0, 1) or (key == "train" and key in messages[number] and not isinstance(value, bool)):
                raise DataError(
                    f"message {number} has {key} {value!r}, {wrong}",
                    where=name,
                    why="a message is learned or not; its loss has no other weight",
                    fix="write weight: 0 or train: false to leave the message out of the loss",
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


@dataclass
class _Turns:
    """The assistant turns of a rendering, and what is needed to say where they are."""

    tokenizer: PreTrainedTokenizerBase
    rendering: Rendering
    contexts: dict[int, str | None]
    kwargs: dict[str, Any] | None
    special: re.Pattern[str]
    name: str
    header: str  # of an answer to a question

    def spans(self) -> dict[int, list[Span]]:
        """Return where each turn is; raise DataError if the rendering does not tell."""
        spans: dict[int, list[Span]] = {}
        reached = 0
        for number in self.contexts:
            start = self._start(number, reached)
            if start is None:
                raise _unclear(number, "begins", self.name)
            end = self._end(number, start)
            if end is None or end < start:
                raise _unclear(number, "ends", self.name)
            spans[number], reached = [(start, end)], end
        return spans

    def without_headers(self, marks: dict[int, list[Span]]) -> dict[int, list[Span]]:
        """Return marked spans from where the model writes: some templates mark the header too, which generation is given."""
        cut = {}
        for number, ((begin, end), *more) in marks.items():
            start = self._start(number, 0)
            cut[number] = [(start if start is not None and begin < start <= end else begin, end), *more]
        return cut

    @cached_property
    def _plain(self) -> str:
        return without_tokens(self.rendering.text, self.special)

    @property
    def _starts(self) -> Sequence[int | None]:
        return self.rendering.trace.starts if self.rendering.trace else [None] * len(self.rendering.messages)

    @property
    def _traced(self) -> bool:
        return any(start is not None for start in self._starts)

    def _bound(self, number: int) -> int:
        """Return where the next message begins, if the loop over the messages tells."""
        following = (start for start in self._starts[number + 1 :] if start is not None)
        return next(following, len(self.rendering.text))

    def _said(self, number: int, start: int) -> int | None:
        """Return where the last part of a turn ends that begins at ``start``; None if a part is not there."""
        within = self.rendering.text[start : self._bound(number)]
        said = said_within(within, self.rendering.messages[number], self.special)
        return None if said is None else start + said

    def _start(self, number: int, reached: int) -> int | None:
        """Return where what the model writes begins: after the context, or after the header if that is shown differently."""
        text, before, loop_start = self.rendering.text, self.contexts[number], self._starts[number]
        begins = before is not None and text.startswith(before) and reached <= len(before) <= self._bound(number)
        if before is not None and begins and self._said(number, len(before)) is not None:
            return len(before)
        if loop_start is None and number:
            return None
        loop_start = loop_start or 0
        # the header of this turn, or that of an answer to a question: the first message has no context that a template renders
        for context in (self.rendering.messages[:number], None):
            header = self.header if context is None else _header(self.tokenizer, context, self.kwargs)
            if header == "" and not number:  # the template shows it at the end of the question
                question = render_as_is(self.tokenizer, _QUESTION, False, self.kwargs) or ""
                header = question.rpartition(str(_QUESTION[0]["content"]))[2]
            if header and not number:  # the end of the question may be before it
                ends = (header[at:] for at in range(len(header)) if text.startswith(header[at:], loop_start))
                header = next((end for end in ends if end.strip()), header)
            if header == "" and context is not None and self._said(number, loop_start) is not None:
                return loop_start
            for end in range(len(header or ""), 0, -1):
                rest = (header or "")[end:]
                if (
                    header is None
                    or THOUGHT_MARK.sub("", rest).strip()
                    or (rest.strip() and header[end - 1] not in _EDGES)
                ):
                    continue  # a header is shown whole, but for an opened thought and white space
                at = text.find(header[:end], loop_start, self._bound(number))
                if at >= 0 and self._said(number, at + end) is not None:
                    return at + end
        # without a header: a beginning with an answer, or the second of two answers in a row
        bare = number == 0 or self.rendering.messages[number - 1]["role"] == "assistant"
        words = "".join(texts_of(self.rendering.messages[number].get("content"))).strip()
        return loop_start if bare and words and text[loop_start:].lstrip().startswith(words) else None

    def _end(self, number: int, start: int) -> int | None:
        """Return where a turn ends, its end-of-turn token included; None where the rendering does not tell."""
        text, messages, said = self.rendering.text, self.rendering.messages, self._said(number, start)
        if said is None:
            return None
        closed = self.rendering.trace.end if self.rendering.trace else None
        if number + 1 < len(messages):
            after = render_as_is(self.tokenizer, messages[: number + 1], False, self.kwargs)
            if after is not None and text.startswith(after) and len(after) >= said:
                end = len(after)
            elif self._traced:
                end = self._bound(number)
            else:
                return None
        elif closed is not None and closed >= said:
            more = None if self.special.search(text, said, closed) else self.special.match(text, closed)
            end = more.end() if more else closed
        else:
            end = self._closed(self._words_end(number, start, len(text)) or said)
        words = self._words_end(number, start, end)
        begins = self.special.match(self.header.lstrip())
        if words is not None and begins and (next_turn := text.find(begins[0], words, end)) >= 0:
            end = next_turn  # the header of an answer that follows
        return _trimmed(text, said if words is None else words, end, self.special)

    def _words_end(self, number: int, start: int, end: int) -> int | None:
        """Return where the words of a turn without calls end: reasoning before them, or a header, may have the same words."""
        message = self.rendering.messages[number]
        words = "".join(texts_of(message.get("content"))).strip()
        if message.get("tool_calls") or not words:
            return None
        text = self._plain[:end]
        ends: list[int] = []
        at = text.find(words, start)
        while at >= 0:
            ends.append(at + len(words))
            at = text.find(words, at + 1)
        closing = [at for at in ends if not text[at:].strip() or text[at:].lstrip().startswith("\0")]
        return (closing or ends or [None])[-1]

    def _closed(self, said: int) -> int:
        """Return the end of the special tokens that follow the next one: a footer may follow."""
        first = self.special.search(self.rendering.text, said)
        run = (
            re.compile(rf"(?:\s*(?:{self.special.pattern}))*").match(self.rendering.text, first.end())
            if first
            else None
        )
        return run.end() if run else len(self.rendering.text)


def _header(tokenizer: PreTrainedTokenizerBase, context: Messages, kwargs: dict[str, Any] | None) -> str | None:
    """Return what a generation prompt adds to a context; None where the template refuses it."""
    wanted, plain = render_as_is(tokenizer, context, True, kwargs), render_as_is(tokenizer, context, False, kwargs)
    return None if wanted is None or plain is None else wanted[_shared(plain, wanted) :]


_EDGES = ">]\n "
_PARTIAL = re.compile(r"(<[^<>\s]*|\[[^\[\]\s]*|\w+)$")


def _shared(one: str, other: str) -> int:
    """Return the length of a common beginning; a token or word is shared whole or not at all."""
    shared = os.path.commonprefix([one, other])
    return len(shared if len(shared) in (len(one), len(other)) else _PARTIAL.sub("", shared))


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


def _check_order(rendering: Rendering, turns: dict[int, list[Span]], name: str) -> None:
    """Raise DataError if another message is shown within a turn."""
    if rendering.trace is None or not any(start is not None for start in rendering.trace.starts):
        return  # where the parts are is then not certain
    for turn, spans in turns.items():
        for other, (first, last) in enumerate(rendering.spans):
            if other != turn and first < last and spans[0][0] < last and first < spans[-1][1]:
                role = rendering.messages[other]["role"]
                raise DataError(
                    f"the chat template shows message {other} (role {role}) within message {turn}, or before its end",
                    where=name,
                    why="the model would learn text that it does not write, or in another order",
                    fix="write the turn as the template shows it, such as a call without words, or set "
                    "model.custom_chat_template",
                    code="E-left-out",
                )


def _marked(
    tokenizer: PreTrainedTokenizerBase, rendering: Rendering, special: re.Pattern[str]
) -> dict[int, list[Span]] | None:
    """Return the spans that the template marks in each turn; None without marks, or where they lack a part of a turn."""
    trace, text = rendering.trace, rendering.text
    if trace is None or not trace.marks:
        return None
    marks = [mark for mark in trace.marks if mark[1] > mark[0]]
    known = any(start is not None for start in trace.starts)
    end = str(tokenizer.eos_token or "")

    def closed(span: Span) -> bool:
        return any(token.end() == span[1] for token in special.finditer(text, *span))

    turns: dict[int, list[Span]] = {}
    for number, message in enumerate(rendering.messages):
        if message["role"] != "assistant":
            continue
        bound = next((start for start in trace.starts[number + 1 :] if start is not None), len(text))
        kept: list[Span] = []
        while marks and marks[0][1] <= bound:  # in the order of the turns; without known starts, until all is said
            if not known and kept and said_within("".join(text[a:b] for a, b in kept), message) is not None:
                break
            kept.append(marks.pop(0))
        if said_within("".join(text[a:b] for a, b in kept), message) is None or (
            kept and kept[0][0] < (trace.starts[number] or 0)
        ):
            return None
        spans: list[Span] = []
        for a, b in kept:
            if spans and closed(spans[-1]) and not special.sub("", text[a:b]).strip():
                continue  # tokens that follow the end of the turn
            spans.append((a, _trimmed(text, a, b, special)))
        if spans and end and not closed(spans[-1]) and text.startswith(end, spans[-1][1]):
            spans[-1] = (spans[-1][0], spans[-1][1] + len(end))
        turns[number] = spans
    return turns


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
            if all(ids[: len(prefix)] == prefix for prefix in before_ids):
                mask = _mask(offsets, marks, edges)
                if mask is not None:
                    rendered.append((ids, mask))
                    continue
        cuts = sorted({0, len(text), *edges})
        chunks = encode_texts(tokenizer, [text[a:b] for a, b in itertools.pairwise(cuts)])
        bits = [int(any(a <= cut < b for a, b in marks)) for cut in cuts]
        mask = [bit for bit, chunk in zip(bits, chunks, strict=False) for _ in chunk]
        rendered.append(([token for chunk in chunks for token in chunk], mask))
    return rendered


def _mask(offsets: list[Span], marks: list[Span], edges: set[int]) -> list[int] | None:
    """Return 1 for each token within a mark; None if a token crosses an edge."""
    begins = [begin for begin, _ in offsets]
    for edge in edges:
        token = bisect.bisect_left(begins, edge) - 1  # the last one that begins before
        if token >= 0 and offsets[token][1] > edge:
            return None
    mask = [0] * len(offsets)
    for begin, end in marks:
        first, last = bisect.bisect_left(begins, begin), bisect.bisect_left(begins, end)
        mask[first:last] = [1] * (last - first)
    return mask
