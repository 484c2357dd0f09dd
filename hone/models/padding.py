"""Padding token of a reward model; transformers finds the last token of a padded row by it.

The end-of-sequence token cannot be that token, because transformers would find the score one token too early. Without any
usable token none is set, and transformers scores one row at a time.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from hone.config.model import ModelConfig
from hone.data.chat import render_prompt
from hone.data.tokenizer import load_tokenizer
from hone.models.loading import causal_lm


def set_model_padding(model: nn.Module, config: ModelConfig) -> None:
    """Write the padding token of the model's tokenizer into the model's config."""
    tokenizer = load_tokenizer(
        config.tokenizer_path or config.path,
        trust_remote_code=config.trust_remote_code,
        custom_chat_template=config.custom_chat_template,
    )
    causal_lm(model).config.pad_token_id = padding_token(tokenizer)


def set_tokenizer_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make :func:`padding_token` the tokenizer's own."""
    pad = padding_token(tokenizer)
    if pad is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the tokenizer's padding token, or a special token that no conversation ends with; None if there is none."""
    special: list[Any] = [
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        tokenizer.unk_token_id,
    ]
    pad, end, begin, unknown = special
    if pad is not None and pad != end:
        return pad
    used = {end, begin}
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        used.update(render_prompt(tokenizer, chat))
    candidates = [unknown, *tokenizer.all_special_ids]
    return next((token for token in candidates if token is not None and token not in used), None)
