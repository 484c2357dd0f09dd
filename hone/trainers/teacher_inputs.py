"""Inputs of teachers besides the sampled tokens: the teacher of each row, its prompt, and the response in its own tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hone.agents.base import EpisodeContext
from hone.agents.tool_agent import shown_of
from hone.algorithms import distillation_advantages
from hone.cluster.handles import TEACHER_RESPONSES, TEACHER_SPANS
from hone.config.distillation import DistillationConfig, is_address
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.data.chat import encode_texts, render_prompt
from hone.data.image_processor import ImageProcessor
from hone.data.images import content_text
from hone.data.ragged import Ragged
from hone.data.row_images import parts_of
from hone.data.spans import Spans, shares_tokenizer, spans_of
from hone.data.teacher_prompt import filled
from hone.data.tokenizer import decoded, load_tokenizer, stop_tokens
from hone.data.types import Sample
from hone.errors import DataError
from hone.insight.metrics import MetricStore
from hone.models.teacher import (
    SPANS,
    TEACHER,
    TEACHER_LOG_PROBS,
    TEACHER_PROMPTS,
)
from hone.training.objectives import token_loss_options


def mixed_advantages(advantages: Ragged, batch: Batch, settings: DistillationConfig, metrics: MetricStore) -> Ragged:
    """Return ``task_weight`` times the reward's advantages plus ``coef`` times those of the teacher.

    Args:
        advantages: of the reward.
        batch: with ``old_log_probs`` and ``teacher_log_probs``.
        settings: block ``distillation``.
        metrics: receives the mean distance of a token.
    """
    mask = batch.ragged("response_mask")
    teacher = distillation_advantages(
        batch.ragged("old_log_probs").to_padded(),
        batch.ragged("teacher_log_probs").to_padded(),
        mask.to_padded(),
        loss_mode=settings.loss_mode,
        **token_loss_options(settings),
        **({"spans": batch.ragged(SPANS).to_padded(-1)} if SPANS in batch else {}),
    )
    distance = -Ragged.from_padded(teacher, mask.lengths).values
    metrics.add("distillation/loss", distance[mask.values.bool()].mean())
    return advantages.with_values(settings.task_weight * advantages.values - settings.coef * distance)


class TeacherInputs:
    """Maker of the teachers' inputs.

    Args:
        images: image processor of the policy; None for a model of text.

    Attributes:
        others: tokenizers of the teachers that have another one than the policy, by the index of the teacher.
    """

    def __init__(self, config: RLConfig, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None) -> None:
        self.config, self.tokenizer, self.images = config, tokenizer, images
        self.others: dict[int, PreTrainedTokenizerBase] = {}
        model = config.actor_rollout_ref.model
        self._stops = stop_tokens(tokenizer, model.path)
        for number, path in enumerate(config.distillation.models):
            if path is not None and not is_address(path):
                teacher = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
                if not shares_tokenizer(tokenizer, teacher):
                    self.others[number] = teacher

    def __call__(self, batch: Batch) -> Batch:
        """Return the columns that the run needs.

        They are ``teacher [B]``, ``teacher_prompt_ids`` if a teacher has a prompt of its own, and with a teacher of another tokenizer the responses in the teachers' tokens, with the spans of both sides.

        Raises:
            DataError: a row lacks a field of the prompt, or a teacher with another tokenizer has a row of several turns.
        """
        settings = self.config.distillation
        teachers = [settings.teacher_of(source) for source in batch.objects("data_source")]
        columns: dict[str, Any] = {TEACHER: torch.tensor(teachers)}
        if settings.teacher_prompt is None and not self.others:
            return Batch(columns)
        prompts: dict[tuple[str, int], list[int]] = {}
        for trajectory, number in zip(batch.objects("trajectory"), teachers, strict=True):
            if (trajectory.uid, number) not in prompts:
                prompts[trajectory.uid, number] = self._prompt(trajectory.sample, self.others.get(number))
        rows = [prompts[key] for key in zip(batch.uids, teachers, strict=True)]
        columns[TEACHER_PROMPTS] = Ragged.from_rows(rows, torch.int64)
        if self.others:
            columns |= self._responses(batch, teachers)
        return Batch(columns)

    def _prompt(self, sample: Sample, teacher: PreTrainedTokenizerBase | None) -> list[int]:
        if teacher is None and self.config.distillation.teacher_prompt is None:
            return list(sample.prompt_ids)
        return teacher_prompt(sample, self.config, self.tokenizer, self.images, teacher)

    def _responses(self, batch: Batch, teachers: list[int]) -> dict[str, Ragged]:
        responses, masks = batch.ragged("response_ids").to_lists(), batch.ragged("response_mask").to_lists()
        rows: list[Spans] = []
        for uid, ids, mask, number in zip(batch.uids, responses, masks, teachers, strict=True):
            if number not in self.others:
                each = list(range(len(ids)))
                rows.append(Spans(ids, each, each))
                continue
            if not all(mask):
                raise DataError(
                    f"row {uid} has {len(mask) - sum(mask)} response tokens that the policy did not sample",
                    why="a teacher with another tokenizer scores single answers: turns of tools are rendered by the policy's template",
                    fix="a teacher with the policy's tokenizer, or a single-turn agent loop",
                    where="distillation.path",
                )
            rows.append(spans_of(ids, self.tokenizer, self.others[number], self._stops))
        columns = {
            TEACHER_RESPONSES: [row.teacher_ids for row in rows],
            TEACHER_SPANS: [row.teacher for row in rows],
            SPANS: [row.policy for row in rows],
        }
        return {name: Ragged.from_rows(lists, torch.int64) for name, lists in columns.items()}


def span_columns(batch: Batch, metrics: MetricStore) -> Batch:
    """Return ``teacher_log_probs`` of the policy's tokens and their spans.

    The log-prob of a span under the teacher is that of its text; each of the policy's tokens in it gets an equal part.

    Args:
        batch: with what the teachers said about their own tokens, and the spans of both sides.
        metrics: receives the mean number of the policy's tokens in a span.
    """
    spans, theirs, said = batch.ragged(SPANS), batch.ragged(TEACHER_SPANS), batch.ragged(TEACHER_LOG_PROBS)
    counts = torch.tensor([int(spans.row(row).max()) + 1 for row in range(len(spans))])
    starts = counts.cumsum(0) - counts
    mine = spans.values + starts.repeat_interleave(spans.lengths)
    other = theirs.values + starts.repeat_interleave(theirs.lengths)
    total = int(counts.sum())
    sums = said.values.new_zeros(total).index_add(0, other, said.values)
    sizes = torch.bincount(mine, minlength=total)
    metrics.add("distillation/span_tokens", len(mine) / total, weight=total)
    log_probs: Tensor = (sums / sizes)[mine]
    return Batch({TEACHER_LOG_PROBS: spans.with_values(log_probs), SPANS: spans})


def teacher_prompt(
    sample: Sample,
    config: RLConfig,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageProcessor | None,
    teacher: PreTrainedTokenizerBase | None = None,
) -> list[int]:
    """Return the token ids of a teacher's prompt: with ``distillation.teacher_prompt`` in the last message of the user.

    Args:
        sample: the row.
        images: image processor of the policy; None for a model of text.
        teacher: the teacher's tokenizer, whose template renders the messages; None for the policy's.

    Raises:
        DataError: the row lacks a field of the text.
    """
    template, reader = config.distillation.teacher_prompt, teacher or tokenizer
    if sample.messages is None:
        text = decoded(tokenizer, sample.prompt_ids)
        return encode_texts(reader, [text if template is None else filled(template, sample, text)])[0]
    messages = [*sample.messages]
    if template is not None:
        last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
        if last < 0:
            raise DataError(f"row {sample.uid} has no message of a user", fix="distillation.teacher_prompt=null")
        text = filled(template, sample, content_text(messages[last]["content"]))
        messages[last] = {**messages[last], "content": parts_of(text) if sample.images else text}
    context = EpisodeContext.from_config(config, tokenizer)
    try:
        shown, tools = shown_of(context)(replace(sample, messages=messages))
    finally:
        context.close()
    kwargs = config.data.apply_chat_template_kwargs
    ids = render_prompt(reader, list(shown), {**kwargs, "tools": tools} if tools else kwargs)
    return ids if images is None else images.expand(ids, sample.images, f"row {sample.uid}")
