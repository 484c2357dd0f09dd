"""From a prompt and a response, in whatever form a dataset has them, to token ids and a mask of what the model wrote.

    prompt                response                 rendered as
    messages              messages or a string     chat template; every assistant turn of the response counts
    a string              messages                 the same, the string being a user message
    (not looked at)       a whole conversation     the same; the prompt is what both sides of the pair begin with
    a string              a string                 plain text; the response ends with the end-of-sequence token
    token ids             token ids or a string    left alone; token ids may come with a mask of what the model wrote

A response that begins with an assistant message follows the prompt; one that begins otherwise is a whole conversation.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.assistant_mask import render_conversations
from hone.data.chat import encode_texts
from hone.data.messages import check_messages
from hone.errors import DataError


@dataclass
class Response:
    """A response with its prompt.

    Attributes:
        prompt_ids: what the model is given, generation prompt included.
        response_ids: up to the last token of the last assistant turn.
        response_mask: 1 on tokens that an assistant wrote, as long as ``response_ids``; the first is 1.
        ref_log_probs: of the response tokens under the reference policy where they were precomputed, else None.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    ref_log_probs: list[float] | None = None

    def cut(self, max_length: int) -> Response:
        """The same with the response's end cut, so that it has at most ``max_length`` tokens with its prompt."""
        room = max(0, max_length - len(self.prompt_ids))
        return replace(self, response_ids=self.response_ids[:room], response_mask=self.response_mask[:room])


@dataclass
class Side:
    """One response of a dataset row, not yet tokenized.

    Attributes:
        prompt: messages, a string or token ids.
        response: messages when the prompt is; else a string or token ids.
        label: true when it is chosen or desirable.
        tools: for the chat template, or None.
        where: the row, for error messages.
        mask: 1 on those token ids of the response that the model wrote, 0 on what tools or users said; None is all of them.
    """

    prompt: Any
    response: Any
    label: bool
    tools: list[dict[str, Any]] | None
    where: str
    mask: list[int] | None = None


def sides_of_pair(
    prompt: Any, chosen: Any, rejected: Any, tools: list[dict[str, Any]] | None, where: str
) -> list[Side]:
    """The chosen and the rejected side of a pair.

    Raises:
        DataError: their forms do not go together.
    """
    if _is_conversation(chosen) and _is_conversation(rejected):
        chats = [
            check_messages(chosen, where=where, column="chosen"),
            check_messages(rejected, where=where, column="rejected"),
        ]
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*chats, strict=False)))
        # a side may not end where the other goes on, and a response begins with an assistant turn
        shared = min(shared, *(len(chat) - 1 for chat in chats))
        while shared and any(chat[shared]["role"] != "assistant" for chat in chats):
            shared -= 1
        if not shared:
            raise DataError(
                "chosen and rejected are conversations that do not begin with the same prompt",
                where=where,
                why="a preference compares two answers to one prompt",
                fix="let both begin with the same messages, up to an assistant message in each",
            )
        pairs = [(chat[:shared], chat[shared:]) for chat in chats]
    else:
        pairs = [_with_prompt(prompt, response, where) for response in (chosen, rejected)]
    return [Side(p, r, label, tools, where) for (p, r), label in zip(pairs, (True, False), strict=True)]


def side_with_label(prompt: Any, completion: Any, label: bool, tools: list[dict[str, Any]] | None, where: str) -> Side:
    """A single labelled response; of a whole conversation the last assistant turn counts.

    Raises:
        DataError: the forms do not go together.
    """
    if _is_conversation(completion):
        chat = check_messages(completion, where=where, column="completion")
        if len(chat) < 2 or chat[-1]["role"] != "assistant":
            raise DataError(
                "the completion is a conversation that does not end with an assistant message",
                where=where,
                fix="end it with the response that the label is about",
            )
        return Side(chat[:-1], chat[-1:], label, tools, where)
    prompt, response = _with_prompt(prompt, completion, where)
    return Side(prompt, response, label, tools, where)


def render_sides(
    sides: Sequence[Side], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None
) -> list[Response]:
    """Tokenize all sides, in order; conversations with the same tools are rendered in one call.

    Raises:
        DataError: a template refuses a conversation or rewrites its beginning, a prompt or response has no token, or a mask
            does not fit its response.
    """
    responses: dict[int, Response] = {}
    by_tools: dict[str, list[int]] = {}
    for number, side in enumerate(sides):
        if side.mask is not None and not _is_ids(side.response):
            raise _wrong_mask(side, "goes with no token ids")
        if isinstance(side.prompt, list) and side.prompt and isinstance(side.prompt[0], dict):
            by_tools.setdefault(json.dumps(side.tools, sort_keys=True), []).append(number)
        else:
            responses[number] = _plain(side, tokenizer)
    for members in by_tools.values():
        group = [sides[number] for number in members]
        kwargs = {**(chat_template_kwargs or {}), **({"tools": group[0].tools} if group[0].tools else {})}
        chats = [side.prompt + side.response for side in group]
        rendered = render_conversations(tokenizer, chats, kwargs, [side.where for side in group])
        for number, side, (ids, mask) in zip(members, group, rendered, strict=True):
            responses[number] = _after_prompt(side, ids, mask)
    for number, side in enumerate(sides):
        found = responses[number]
        if not found.prompt_ids or not any(found.response_mask):
            what = "response" if found.prompt_ids else "prompt"
            raise DataError(f"the {what} has no tokens", where=side.where, fix="remove the row")
    return [responses[number] for number in range(len(sides))]


def _with_prompt(prompt: Any, response: Any, where: str) -> tuple[Any, Any]:
    """Prompt and response in forms that go together."""
    if prompt is None or prompt == []:
        raise DataError(
            "there is no prompt, and the responses are not whole conversations",
            where=where,
            fix="add a column of prompts (data.prompt_key), or let both responses begin with the user's message",
        )
    if _is_messages(prompt) or _is_messages(response):
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        response = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
        messages = check_messages(prompt, where=where, column="prompt")
        answer = check_messages(response, where=where, column="response")
        if answer[0]["role"] != "assistant":
            raise DataError(
                f"the response begins with a message of role '{answer[0]['role']}'",
                where=where,
                why="the first thing that follows a prompt is what the model writes",
                fix="begin it with an assistant message, or make both sides whole conversations",
            )
        return messages, answer
    if not isinstance(prompt, str) and not _is_ids(prompt) or not isinstance(response, str) and not _is_ids(response):
        raise DataError(
            f"a prompt of type {type(prompt).__name__} and a response of type {type(response).__name__}",
            where=where,
            fix="use messages, strings or token ids",
        )
    if isinstance(prompt, str) and not isinstance(response, str):
        raise DataError(
            "the response is token ids, the prompt is text", where=where, fix="give the prompt as token ids"
        )
    return prompt, response


def _plain(side: Side, tokenizer: PreTrainedTokenizerBase) -> Response:
    """Text or token ids, without a chat template."""
    prompt, response = side.prompt, side.response
    if isinstance(prompt, str):
        prompt = list(tokenizer(prompt, return_attention_mask=False)["input_ids"])  # type: ignore[call-overload]
    if isinstance(response, str):
        end = tokenizer.eos_token_id
        response = encode_texts(tokenizer, [response])[0] + ([] if end is None else [int(end)])  # type: ignore[arg-type]
    return Response(list(prompt), list(response), _mask(side, len(response)))


def _mask(side: Side, length: int) -> list[int]:
    """What counts among the ``length`` tokens of a response of token ids."""
    if side.mask is None:
        return [1] * length
    mask = [int(value) for value in side.mask]
    if len(mask) != length:
        raise _wrong_mask(side, f"has {len(mask)} entries for {length} tokens")
    if set(mask) - {0, 1}:
        raise _wrong_mask(side, f"holds {min(set(mask) - {0, 1})}")
    if mask[0] == 0:
        raise _wrong_mask(side, "begins with 0")
    return mask


def _wrong_mask(side: Side, what: str) -> DataError:
    return DataError(
        f"the mask of the {'chosen or desirable' if side.label else 'rejected or undesirable'} response {what}",
        where=side.where,
        why="it says which of the response's token ids the model wrote, the first of them always",
        fix="write 1 for each token that the model wrote and 0 for each other, as `hone data pairs --as tokens` does",
    )


def _after_prompt(side: Side, ids: list[int], mask: list[int]) -> Response:
    """Cut a rendered conversation behind its prompt and behind its last assistant token."""
    turns = [start for start, (before, now) in enumerate(itertools.pairwise([0, *mask])) if now > before]
    earlier = sum(message["role"] == "assistant" for message in side.prompt)
    start = turns[earlier] if earlier < len(turns) else len(ids)
    end = len(mask) - mask[::-1].index(1) if 1 in mask else len(ids)
    return Response(ids[:start], ids[start:end], mask[start:end])


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _is_conversation(value: Any) -> bool:
    """Messages that do not begin with the assistant: they hold their prompt themselves."""
    return _is_messages(value) and value[0].get("role") != "assistant"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)
