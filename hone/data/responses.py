"""Convert a prompt and a response, in any form of a dataset, to token ids and a mask of the model's tokens.

    prompt                response                 rendered as
    messages              messages or a string     chat template; every assistant turn of the response counts
        a string              messages                 the same, with the string as a user message
        (ignored)             a whole conversation     the same; the prompt is the beginning that both sides of the pair share
        a string              a string                 plain text; the response ends with the end-of-sequence token
        token ids             token ids or a string    unchanged; token ids may have a mask of the model's tokens

A response that begins with an assistant message follows the prompt; any other list of messages is a whole conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.chat import encode_texts
from hone.data.files import Row
from hone.data.images import ImageData
from hone.data.messages import check_messages
from hone.data.row_images import RowImages
from hone.data.tokenizing import Chats, tokenize
from hone.errors import DataError


@dataclass
class Response:
    """A response with its prompt."""

    prompt_ids: list[int]  # input of the model, generation prompt included
    response_ids: list[int]  # tokens up to the last one of the last assistant turn
    response_mask: list[int]  # 1 on the assistant's tokens, same length as ``response_ids``; the first is 1
    # log-probs of the response tokens under the reference policy if precomputed, else None
    ref_log_probs: list[float] | None = None
    images: tuple[ImageData, ...] = ()  # images of prompt and response, in order

    def cut(self, max_length: int) -> Response:
        """Truncate the end of the response so that prompt and response have at most ``max_length`` tokens."""
        room = max(0, max_length - len(self.prompt_ids))
        return replace(self, response_ids=self.response_ids[:room], response_mask=self.response_mask[:room])


@dataclass
class Side:
    """One response of a dataset row, not yet tokenized."""

    prompt: Any  # messages, a string or token ids
    response: Any  # messages if the prompt is messages, else a string or token ids
    label: bool  # true for chosen or desirable
    tools: list[dict[str, Any]] | None  # function schemas for the chat template, or None
    where: str  # the row, for error messages
    # 1 on response tokens that the model wrote, 0 on those of tools or users; None: the model wrote all of them
    mask: list[int] | None = None
    # images of prompt and response, in order; messages have a part at the place of each
    images: tuple[ImageData, ...] = ()

    @property
    def is_chat(self) -> bool:
        return _is_messages(self.prompt)

    def placed(self, images: RowImages, row: Row) -> Side:
        """Return the side with the images of its row in place, see :meth:`RowImages.place`."""
        if not self.is_chat:
            return replace(self, images=images.of_text(row))
        messages, contents = images.place(self.prompt + self.response, row)
        start = len(self.prompt)
        return replace(self, prompt=messages[:start], response=messages[start:], images=contents)


def sides_of_pair(
    prompt: Any, chosen: Any, rejected: Any, tools: list[dict[str, Any]] | None, where: str
) -> list[Side]:
    """Return the chosen and the rejected side of a pair.

    Raises DataError: the forms of prompt and responses cannot be combined.
    """
    if _is_conversation(chosen) and _is_conversation(rejected):
        chats = [
            check_messages(chosen, where=where, column="chosen"),
            check_messages(rejected, where=where, column="rejected"),
        ]
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*chats, strict=False)))
        # neither side may end where the other continues, and a response begins with an assistant turn
        shared = min(shared, *(len(chat) - 1 for chat in chats))
        while shared and any(chat[shared]["role"] != "assistant" for chat in chats):
            shared -= 1
        if not shared:
            raise DataError(
                "chosen and rejected are conversations with different prompts",
                where=where,
                why="a preference compares two answers to one prompt",
                fix="begin both with the same messages, followed by an assistant message in each",
            )
        pairs = [(chat[:shared], chat[shared:]) for chat in chats]
    else:
        pairs = [_with_prompt(prompt, response, where) for response in (chosen, rejected)]
    return [Side(p, r, label, tools, where) for (p, r), label in zip(pairs, (True, False), strict=True)]


def side_with_label(prompt: Any, completion: Any, label: bool, tools: list[dict[str, Any]] | None, where: str) -> Side:
    """Return a single labelled response; in a whole conversation the last assistant turn counts.

    Raises DataError: the forms of prompt and response cannot be combined.
    """
    if _is_conversation(completion):
        chat = check_messages(completion, where=where, column="completion")
        if len(chat) < 2 or chat[-1]["role"] != "assistant":
            raise DataError(
                "the completion is a conversation whose last message is not an assistant message",
                where=where,
                fix="end it with the labelled response",
            )
        return Side(chat[:-1], chat[-1:], label, tools, where)
    prompt, response = _with_prompt(prompt, completion, where)
    return Side(prompt, response, label, tools, where)


def render_sides(
    sides: Sequence[Side],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None = None,
    images: RowImages | None = None,
) -> list[Response]:
    """Tokenize all sides, in order; conversations with the same tools are rendered in one call.

    Args:
        sides: with their images in place.
        tokenizer: needs a chat template only for messages.
        images: reader of the images; None for a model of text.

    Raises:
        DataError: a template refuses a conversation or rewrites its beginning, a prompt or response has no token, or a mask
            does not match its response.
    """
    responses: dict[int, Response] = {}
    rendered: list[int] = []
    for number, side in enumerate(sides):
        if side.mask is not None and not _is_ids(side.response):
            raise _wrong_mask(side, "is given, but the response is not token ids")
        if side.is_chat:
            rendered.append(number)
        else:
            response = _without_template(side, tokenizer)
            if images is not None:
                response.prompt_ids = images.expand(response.prompt_ids, side.images, side.where)
            responses[number] = replace(response, images=side.images)
    group = [sides[number] for number in rendered]
    # what is learned are the turns of the response alone: its first learned token is where it begins
    prompts = [[{**message, "weight": 0} for message in side.prompt] for side in group]
    for side in group:
        if side.response[0].get("weight", 1) == 0 or side.response[0].get("train", True) is False:
            raise DataError("the first turn of a response has weight: 0 or train: false", where=side.where,
                            why="the two sides of the pair would have different prompts",
                            fix="move the turn into the prompt, or remove its weight")  # fmt: skip
    messages = [prompt + side.response for prompt, side in zip(prompts, group, strict=True)]
    tools = [side.tools or None for side in group]
    names = [side.where for side in group]
    tokens = tokenize(tokenizer, Chats("conversation", messages, tools, names, chat_template_kwargs or {}))
    for number, side, (ids, mask) in zip(rendered, group, tokens, strict=True):
        if images is not None:
            ids, mask = images.expand_masked(ids, mask, side.images, side.where)
        responses[number] = replace(_after_prompt(ids, mask), images=side.images)
    for number, side in enumerate(sides):
        response = responses[number]
        if not response.prompt_ids or not any(response.response_mask):
            what = "response" if response.prompt_ids else "prompt"
            raise DataError(f"the {what} has no tokens", where=side.where, fix="remove the row")
    return [responses[number] for number in range(len(sides))]


def _with_prompt(prompt: Any, response: Any, where: str) -> tuple[Any, Any]:
    """Return prompt and response in forms that can be combined."""
    if prompt is None or prompt == []:
        raise DataError(
            "the row has no prompt, and its responses are not whole conversations",
            where=where,
            fix="add a column of prompts (data.prompt_key), or begin both responses with the user's message",
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
                why="the first message after a prompt must be the model's",
                fix="begin it with an assistant message, or write both sides as whole conversations",
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


def _without_template(side: Side, tokenizer: PreTrainedTokenizerBase) -> Response:
    """Tokenize a side of text or token ids, without a chat template."""
    prompt, response = side.prompt, side.response
    if isinstance(prompt, str):
        prompt = list(tokenizer(prompt, return_attention_mask=False)["input_ids"])  # type: ignore[call-overload]
    if isinstance(response, str):
        end, response = tokenizer.eos_token_id, encode_texts(tokenizer, [response])[0]
        if isinstance(end, int) and response[-1:] != [end]:
            response.append(end)
    return Response(list(prompt), list(response), _mask(side, len(response)))


def _mask(side: Side, length: int) -> list[int]:
    """Return the response mask of a response of ``length`` token ids."""
    if side.mask is None:
        return [1] * length
    mask = [int(value) for value in side.mask]
    if len(mask) != length:
        raise _wrong_mask(side, f"has {len(mask)} entries for {length} tokens")
    if set(mask) - {0, 1}:
        raise _wrong_mask(side, f"contains {min(set(mask) - {0, 1})}")
    if mask[0] == 0:
        raise _wrong_mask(side, "begins with 0")
    return mask


def _wrong_mask(side: Side, what: str) -> DataError:
    return DataError(
        f"the mask of the {'chosen or desirable' if side.label else 'rejected or undesirable'} response {what}",
        where=side.where,
        why="the mask marks the response tokens that the model wrote; the first is always one of them",
        fix="write 1 for each token of the model and 0 for all others, as `hone data pairs --as tokens` does",
    )


def _after_prompt(ids: list[int], mask: list[int]) -> Response:
    """Split a rendered conversation before its first learned token, and truncate it after its last."""
    start = mask.index(1) if 1 in mask else len(ids)
    end = len(mask) - mask[::-1].index(1) if 1 in mask else len(ids)
    return Response(ids[:start], ids[start:end], mask[start:end])


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _is_conversation(value: Any) -> bool:
    return _is_messages(value) and value[0].get("role") != "assistant"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)
