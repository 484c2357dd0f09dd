"""Show a row as the model sees it: its tokens, and which of them carry loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.assistant_mask import render_conversations
from hone.data.chat import render_prompt, special_tokens
from hone.data.files import Row
from hone.data.images import is_image
from hone.data.messages import check_messages, plain
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
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str = "prompt",
    messages_key: str = "messages",
    conversation: bool = False,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[InspectedToken]:
    """Return the tokens of a row: of its prompt as generation sees it, or of its whole conversation as SFT sees it.

    Args:
        row: row of a dataset file.
        tokenizer: tokenizer, with a chat template if the row holds messages.
        prompt_key: column of the prompt.
        messages_key: column of the conversation.
        conversation: show the conversation; implied if the row has no prompt.
        chat_template_kwargs: additional arguments of the chat template.

    Raises:
        DataError: the row has neither column, or the template refuses it.
    """
    prompt, chat = plain(row.values.get(prompt_key)), plain(row.values.get(messages_key))
    if prompt is None and chat is None:
        raise DataError(
            f"no column '{prompt_key}' or '{messages_key}'; the columns are {', '.join(row.values)}",
            where=row.where,
            fix="name them with --prompt-key or --messages-key",
        )
    if chat is not None and (conversation or prompt is None):
        messages = check_messages(chat, where=row.where, column=messages_key)
        ((ids, mask),) = render_conversations(tokenizer, [messages], chat_template_kwargs, [row.where])
    else:
        ids = _prompt_ids(prompt, row, tokenizer, prompt_key, chat_template_kwargs)
        mask = [0] * len(ids)
    special = special_tokens(tokenizer)
    return [
        InspectedToken(token, _text_of(tokenizer, token), token in special or is_image(token), bool(learned))
        for token, learned in zip(ids, mask, strict=True)
    ]


def _text_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return decoded(tokenizer, [token]) or str(tokenizer.convert_ids_to_tokens(token))


def _prompt_ids(
    prompt: Any, row: Row, tokenizer: PreTrainedTokenizerBase, key: str, kwargs: dict[str, Any] | None
) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt, return_attention_mask=False)["input_ids"])  # type: ignore[arg-type]
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return prompt
    return render_prompt(tokenizer, check_messages(prompt, where=row.where, column=key), kwargs)
