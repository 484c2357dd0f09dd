"""The prompts of RL: rows rendered to token ids, with what the scorer needs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.chat import render_prompts
from hone.data.files import Row, read_rows
from hone.data.overlong import check_lengths
from hone.data.types import Sample
from hone.errors import DataError

log = logging.getLogger("hone")


class PromptDataset:
    """Rows of prompts as :class:`~hone.data.types.Sample`.

    A prompt is a list of messages (rendered with the chat template), a string (encoded as it is) or a list of token ids
    (left alone). The answer stands in ``reward_model.ground_truth``.

    Args:
        files: parquet, json or jsonl files.
        tokenizer: renders and encodes.
        prompt_key: column of the prompt.
        reward_fn_key: column of the data source.
        max_prompt_length: in tokens.
        truncation: policy for longer ones: ``error``, ``drop``, ``truncate`` (cut the beginning).
        max_samples: read at most this many rows; -1 means all.
        chat_template_kwargs: extra arguments of the chat template.

    Attributes:
        dropped: rows left out because they are too long.
        truncated: rows cut.

    Raises:
        DataError: files, columns, types or lengths are wrong.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str,
        reward_fn_key: str,
        max_prompt_length: int,
        truncation: str,
        max_samples: int = -1,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        where = ", ".join(files)
        rows = read_rows(files, needs=[prompt_key, reward_fn_key], max_samples=max_samples)
        samples = [_sample(uid, row, prompt_key, reward_fn_key) for uid, row in rows]
        _encode(samples, [row[prompt_key] for _, row in rows], tokenizer, chat_template_kwargs or {})
        lengths = [len(sample.prompt_ids) for sample in samples]
        over = check_lengths(lengths, max_prompt_length, truncation, key="data.max_prompt_length", where=where)
        self.dropped = sum(over) if truncation == "drop" else 0
        self.truncated = sum(over) if truncation == "truncate" else 0
        if self.dropped or self.truncated:
            word = "dropped" if self.dropped else "cut"
            log.warning(
                "%s: %d of %d prompts longer than %d tokens %s", where, sum(over), len(over), max_prompt_length, word
            )
        for sample in samples:
            sample.prompt_ids = (
                sample.prompt_ids[-max_prompt_length:] if truncation == "truncate" else sample.prompt_ids
            )
        self._samples = [
            sample for sample, long in zip(samples, over, strict=True) if not (long and truncation == "drop")
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def data_sources(self) -> Counter[str]:
        """How many rows each data source has."""
        return Counter(sample.data_source for sample in self._samples)


def _sample(uid: str, row: Row, prompt_key: str, reward_fn_key: str) -> Sample:
    prompt, reward_model = row[prompt_key], row.get("reward_model") or {}
    if not isinstance(reward_model, dict):
        raise DataError(
            f"column 'reward_model' is a {type(reward_model).__name__}", where=uid, fix="{ground_truth: ...}"
        )
    if not isinstance(row[reward_fn_key], str):
        raise DataError(
            f"column '{reward_fn_key}' is not a string: {row[reward_fn_key]!r}", where=uid, fix="name the source"
        )
    messages = _messages(prompt, uid, prompt_key)
    return Sample(
        uid=uid,
        prompt_ids=[],
        messages=messages,
        data_source=row[reward_fn_key],
        ground_truth=reward_model.get("ground_truth"),
        extra_info=row.get("extra_info") or {},
    )


def _messages(prompt: Any, uid: str, key: str) -> list[dict[str, Any]] | None:
    if isinstance(prompt, str) and prompt:
        return None
    if isinstance(prompt, list) and prompt:
        if all(isinstance(token, int) for token in prompt):
            return None
        if all(isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") is not None for m in prompt):
            return prompt
    raise DataError(
        f"column '{key}' is neither messages, nor a string, nor token ids: {str(prompt)[:80]!r}",
        where=uid,
        fix='give [{"role": "user", "content": "..."}]',
        code="R42",
    )


def _encode(
    samples: list[Sample], prompts: list[Any], tokenizer: PreTrainedTokenizerBase, template: dict[str, Any]
) -> None:
    chats = [sample for sample in samples if sample.messages is not None]
    rendered = render_prompts(tokenizer, [sample.messages or [] for sample in chats], **template)
    for sample, ids in zip(chats, rendered, strict=True):
        sample.prompt_ids = list(ids)
    for sample, prompt in zip(samples, prompts, strict=True):
        if sample.messages is None:
            sample.prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
