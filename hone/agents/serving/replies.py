"""JSON of answers in OpenAI's form: complete, or streamed in chunks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import Message
from hone.data.types import StopReason
from hone.generation.protocol import Alternatives, Completion


@dataclass(frozen=True)
class Heading:
    """Fields that every chunk of an answer repeats."""

    id: str
    object: str  # ``object`` of a complete answer, ``chat.completion`` or ``text_completion``
    chunk_object: str  # ``object`` of a chunk
    model: str
    created: int  # start of the answer, in seconds since the epoch

    @classmethod
    def start(cls, number: str, model: str, *, chat: bool) -> Heading:
        if chat:
            return cls(f"chatcmpl-{number}", "chat.completion", "chat.completion.chunk", model, int(time.time()))
        return cls(f"cmpl-{number}", "text_completion", "text_completion", model, int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._fields(self.object), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return {**self._fields(self.chunk_object), "choices": choices} | ({} if usage is None else {"usage": usage})

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(prompt: Sequence[int], completions: Sequence[Completion]) -> dict[str, int]:
    """Count the tokens of a request; the prompt counts once."""
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}


def finish_reason(completion: Completion, message: Message | None = None) -> str:
    """Return OpenAI's ``finish_reason`` of a reply."""
    if message is not None and message.get("tool_calls"):
        return "tool_calls"
    return "length" if completion.stop_reason is StopReason.LENGTH else "stop"


def chat_log_probs(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    log_probs: Sequence[float],
    alternatives: Sequence[Alternatives] = (),
) -> dict[str, Any]:
    """Return the log-prob of every sampled token under the policy, and its alternatives, in the form of chat completions."""

    def entry(index: int, log_prob: float) -> dict[str, Any]:
        token = str(tokenizer.decode([index]))
        return {"token": token, "logprob": log_prob, "bytes": list(token.encode())}

    entries = []
    for index, log_prob, others in zip(ids, log_probs, alternatives or [[]] * len(ids), strict=True):
        entries.append({**entry(index, log_prob), "top_logprobs": [entry(*other) for other in others]})
    return {"content": entries, "refusal": None}


def text_log_probs(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    log_probs: Sequence[float],
    alternatives: Sequence[Alternatives] = (),
    *,
    offset: int = 0,
) -> dict[str, Any]:
    """Return the log-prob of every token under the policy, and its alternatives, in the form of completions.

    Of tokens with the same text the later ones have names like ``token_id:17``.
    """
    tokens = [str(tokenizer.decode([index])) for index in ids]
    offsets = itertools.accumulate(map(len, tokens[:-1]), initial=offset)
    others: list[dict[str, float]] = []
    for index, token, log_prob, likeliest in zip(ids, tokens, log_probs, alternatives, strict=bool(alternatives)):
        named = {token: log_prob}
        for other, value in likeliest:
            text = str(tokenizer.decode([other]))
            if other != index:
                named[f"token_id:{other}" if text in named else text] = value
        others.append(dict(sorted(named.items(), key=lambda entry: -entry[1])))
    return {
        "tokens": tokens,
        "token_logprobs": list(log_probs),
        "top_logprobs": others or None,
        "text_offset": list(offsets) if tokens else [],
    }


def echoed_log_probs(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], scores: Sequence[Alternatives], top: int
) -> dict[str, Any]:
    """Return the log-probs of a prompt's tokens in the form of completions: null for the first token.

    ``scores`` are as for :func:`prompt_log_probs`, with at least ``top`` likeliest tokens.
    """
    others = [[], *(place[1 : 1 + top] for place in scores)] if top else []
    entry = text_log_probs(tokenizer, ids, [0.0, *(place[0][1] for place in scores)], others)
    for name in ("token_logprobs", "top_logprobs"):
        entry[name] = entry[name] and [None, *entry[name][1:]]
    return entry


def prompt_log_probs(
    tokenizer: PreTrainedTokenizerBase, scores: Sequence[Alternatives]
) -> list[dict[str, dict[str, Any]] | None]:
    """Return the log-probs of a prompt's tokens in vLLM's form: null for the first token, then an object by token id.

    ``scores`` has for each token after the first itself, then the likeliest ones, with their log-probs.
    """
    texts: dict[int, str] = {}

    def entry(token: int, log_prob: float, rank: int | None) -> dict[str, Any]:
        if token not in texts:
            texts[token] = str(tokenizer.decode([token]))
        return {"logprob": log_prob, "rank": rank, "decoded_token": texts[token]}

    places: list[dict[str, dict[str, Any]] | None] = [None]
    for (token, log_prob), *likeliest in scores:
        place = {str(token): entry(token, log_prob, None)}
        place |= {str(other): entry(other, value, rank) for rank, (other, value) in enumerate(likeliest, 1)}
        places.append(place)
    return places


def cut(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` up to the first stop string."""
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(positions)] if positions else text


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return the stop string that occurs first in ``text``, or None."""
    return min((stop for stop in stops if stop in text), key=text.find, default=None)


class TextStream:
    """Incremental text of a reply, limited to text that can no longer change.

    The end is held back if it may be a partial character or the start of a stop string.

    >>> stream = TextStream(["END"])
    >>> stream.grow("1, 2 E"), stream.grow("1, 2 Eh"), stream.grow("1, 2 Eh END 3"), stream.end("1, 2 Eh END 3")
    ('1, 2 ', 'Eh', ' ', '')

    Args:
        stops: strings that end the text and are not part of it.
        marks: strings that end the text if they are complete, such as the mark of a tool call; a part of one is held back.
    """

    def __init__(self, stops: Sequence[str], marks: Sequence[str] = ()) -> None:
        self._stops, self._held, self.sent = stops, (*stops, *marks), ""

    def grow(self, text: str) -> str:
        """Return the new part of ``text``, the text of all tokens sampled until now."""
        text = cut(text, self._stops)
        text = text[: len(text) - max((_overlap(text, held) for held in self._held), default=0)]
        return self._new(text.rstrip("\ufffd"))

    def end(self, text: str) -> str:
        """Return the unsent rest of the complete text."""
        return self._new(cut(text, self._stops))

    def _new(self, text: str) -> str:
        if not text.startswith(self.sent):  # the tokenizer decodes earlier tokens differently because of later ones
            return ""
        new, self.sent = text[len(self.sent) :], text
        return new


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
