"""Inputs of teachers besides the sampled tokens: the teacher of each row, and the prompt that it sees."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hone.agents.context import EpisodeContext
from hone.agents.prompts import tools_of
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.data.chat import encode_texts, render_prompt
from hone.data.image_processor import ImageProcessor
from hone.data.images import content_text
from hone.data.ragged import Ragged
from hone.data.row_images import parts_of
from hone.data.teacher_prompt import filled
from hone.data.tokenizer import decoded
from hone.data.types import Sample
from hone.errors import DataError
from hone.models.teacher import TEACHER, TEACHER_PROMPTS


def teacher_inputs(
    batch: Batch, config: RLConfig, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None
) -> Batch:
    """Return ``teacher [B]`` if there are several, and ``teacher_prompt_ids`` if ``distillation.teacher_prompt`` is set.

    Raises:
        DataError: a row lacks a field of the prompt.
    """
    settings = config.distillation
    columns: dict[str, Any] = {}
    if len(settings.models) > 1:
        columns[TEACHER] = torch.tensor([settings.teacher_of(source) for source in batch.objects("data_source")])
    if settings.teacher_prompt is not None:
        rendered: dict[str, list[int]] = {}
        for trajectory in batch.objects("trajectory"):
            if trajectory.uid not in rendered:
                rendered[trajectory.uid] = teacher_prompt(trajectory.sample, config, tokenizer, images)
        columns[TEACHER_PROMPTS] = Ragged.from_rows([rendered[uid] for uid in batch.uids], torch.int64)
    return Batch(columns)


def teacher_prompt(
    sample: Sample, config: RLConfig, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None
) -> list[int]:
    """Return the prompt's token ids with the text ``distillation.teacher_prompt`` in the last message of the user.

    Raises:
        DataError: the row lacks a field of the text.
    """
    template = str(config.distillation.teacher_prompt)
    if sample.messages is None:
        text = decoded(tokenizer, sample.prompt_ids)
        return encode_texts(tokenizer, [filled(template, sample, text)])[0]
    last = max((n for n, message in enumerate(sample.messages) if message["role"] == "user"), default=-1)
    if last < 0:
        raise DataError(f"row {sample.uid} has no message of a user", fix="distillation.teacher_prompt=null")
    text = filled(template, sample, content_text(sample.messages[last]["content"]))
    messages = [*sample.messages]
    messages[last] = {**messages[last], "content": parts_of(text) if sample.images else text}
    context = EpisodeContext.from_config(config, tokenizer)
    try:
        tools = list(tools_of(context)(sample))
    finally:
        context.close()
    kwargs = config.data.apply_chat_template_kwargs
    ids = render_prompt(tokenizer, messages, {**kwargs, "tools": tools} if tools else kwargs)
    return ids if images is None else images.expand(ids, sample.images, f"row {sample.uid}")
