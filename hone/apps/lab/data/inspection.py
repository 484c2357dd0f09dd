"""Show a row as the model sees it: its tokens, and which of them carry loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.assistant_mask import render_conversations
from hone.data.chat import render_prompt, special_tokens
from hone.data.files import Row
from hone.data.images import IMAGE_MARK, REST_OF_IMAGE, ImageData, is_image, place_of
from hone.data.messages import check_messages, plain, schemas_of
from hone.data.row_images import RowImages
from hone.data.tokenizer import decoded
from hone.errors import DataError


@dataclass(frozen=True)
class InspectedToken:
    """One token: its id, its text, whether it is special, and whether it carries loss."""

    token: int
    text: str
    special: bool
    learned: bool


def inspect_row(
    row: Row,  # row of a dataset file
    tokenizer: PreTrainedTokenizerBase,  # tokenizer, with a chat template if the row holds messages
    *,
    prompt_key: str = "prompt",
    messages_key: str = "messages",  # column of the conversation
    tools_key: str = "tools",  # column of the conversation's function schemas
    conversation: bool = False,  # show the conversation; implied if the row has no prompt
    chat_template_kwargs: dict[str, Any] | None = None,  # additional arguments of the chat template
    images: RowImages | None = None,  # reader of the row's images; None shows the text alone
) -> list[InspectedToken]:
    """Return the tokens of a row: of its prompt as generation sees it, or of its whole conversation as SFT sees it."""
    prompt, chat = plain(row.values.get(prompt_key)), plain(row.values.get(messages_key))
    tools = schemas_of(row.values.get(tools_key), row.where)
    shown_kwargs = {**(chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
    if prompt is None and chat is None:
        raise DataError(
            f"no column '{prompt_key}' or '{messages_key}'; the columns are {', '.join(row.values)}",
            where=row.where,
            fix="name them with --prompt-key or --messages-key",
        )
    if chat is not None and (conversation or prompt is None):
        messages, shown = _placed(check_messages(chat, where=row.where, column=messages_key), row, images)
        ((ids, mask),) = render_conversations(tokenizer, [messages], shown_kwargs, [row.where])
    elif isinstance(prompt, str) or (isinstance(prompt, list) and all(type(item) is int for item in prompt)):
        ids = list(tokenizer(prompt, return_attention_mask=False)["input_ids"]) if isinstance(prompt, str) else prompt
        mask, shown = [0] * len(ids), () if images is None else images.of_text(row)
    else:
        messages, shown = _placed(check_messages(prompt, where=row.where, column=prompt_key), row, images)
        ids = render_prompt(tokenizer, messages, chat_template_kwargs)
        mask = [0] * len(ids)
    if images is not None:
        ids, mask = images.expand_masked(ids, mask, shown, row.where)
    special = special_tokens(tokenizer)
    return [
        InspectedToken(token, _text_of(tokenizer, token), token in special or is_image(token), bool(learned))
        for token, learned in zip(ids, mask, strict=True)
    ]


def _text_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    if is_image(token):
        return REST_OF_IMAGE if place_of(token) else IMAGE_MARK
    return decoded(tokenizer, [token]) or str(tokenizer.convert_ids_to_tokens(token))


def _placed(
    messages: list[dict[str, Any]], row: Row, images: RowImages | None
) -> tuple[list[dict[str, Any]], tuple[ImageData, ...]]:
    return (messages, ()) if images is None else images.place(messages, row)
