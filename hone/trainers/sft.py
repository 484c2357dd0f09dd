"""SFT trainer: imitate the assistant turns of conversations, or follow a teacher on them; the loss is the mean over assistant tokens."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, cast

import torch

from hone.cluster.handles import AnyBatch, Teacher
from hone.config.distillation import TOP_K_MODES
from hone.config.offline import SFTConfig
from hone.data.batch import Batch
from hone.data.conversations import Conversation, ConversationDataset
from hone.data.custom import row_reader
from hone.data.files import file_list
from hone.data.images import images_column
from hone.data.ragged import Ragged
from hone.insight.metrics import MetricStore
from hone.models.loading import saved_settings
from hone.models.teacher import LOG_PROBS
from hone.trainers.attempts import supervised
from hone.trainers.offline import OfflineTrainer
from hone.training.served_teacher import ServedTeachers


def train(config: SFTConfig) -> int:
    """Run `hone sft` and return the exit code."""
    return supervised(config, lambda config, supervisor: SFTTrainer(config, supervisor).fit())


class SFTTrainer(OfflineTrainer[SFTConfig, ConversationDataset]):
    """Trainer of one supervised run."""

    def open_dataset(self, files: Any, max_samples: int) -> ConversationDataset:
        """Load the conversations in ``files``."""
        data = self.config.data
        return ConversationDataset(
            file_list(files),
            self.tokenizer,
            messages_key=data.messages_key,
            tools_key=data.tools_key,
            max_length=data.max_length,
            truncation=data.truncation,
            max_samples=max_samples,
            chat_template_kwargs=data.apply_chat_template_kwargs,
            drop_bad_calls=data.tool_call_errors == "drop",
            read=row_reader(data, self.tokenizer),
            image_key=data.image_key,
            image_processor=self.image_processor,
        )

    def batch(self, rows: Sequence[Conversation]) -> Batch:
        """Convert rows to columns with :func:`conversation_batch`."""
        return conversation_batch(rows)

    def prepare(self, batch: Batch, metrics: MetricStore) -> AnyBatch:
        """Give the batch to the runtime, with what the teacher says about the answers."""
        if not self.config.distillation.enable:
            return self.runtime.put(batch)
        with metrics.timer("teacher"):
            if self.config.distillation.has_local:
                there, teacher = self.runtime.put(batch), cast(Teacher, self.runtime.group("teacher"))
                there = there.updated(teacher.teach(there).result())
            else:
                columns = self.session.shared(lambda: asyncio.run(self._served_teachers.columns(batch)))
                there = self.runtime.put(batch.updated(columns))
        if self.config.distillation.loss_mode in TOP_K_MODES:
            said = self.runtime.fetch(there.select(LOG_PROBS)).ragged(LOG_PROBS).values
            mask = batch.ragged("response_mask").values.bool()
            metrics.add("distillation/teacher_mass", said[mask].exp().sum(-1).mean())
        return there

    @functools.cached_property
    def _served_teachers(self) -> ServedTeachers:
        vocabulary = saved_settings(self.config.model).get_text_config().vocab_size
        return ServedTeachers(self.config.distillation, vocabulary)

    def measure(self, batch: Batch) -> dict[str, float]:
        """Return the mean negative log-likelihood of the assistant tokens."""
        mask = batch.ragged("response_mask").values.bool()
        log_probs = self.outputs(self.runtime.put(batch)).ragged("log_probs")
        return {"val/loss": float(-log_probs.values[mask].mean())}


def conversation_batch(conversations: Sequence[Conversation]) -> Batch:
    """Build a batch whose "prompt" ends before the first loss token; tokens after the last loss token are dropped.

    Rows with images add the column ``images``.
    """
    prompts, responses, masks = [], [], []
    for conversation in conversations:
        first = conversation.loss_mask.index(1)
        last = len(conversation.loss_mask) - conversation.loss_mask[::-1].index(1)
        prompts.append(conversation.input_ids[:first])
        responses.append(conversation.input_ids[first:last])
        masks.append(conversation.loss_mask[first:last])
    return Batch(
        {
            "uid": [str(number) for number in range(len(conversations))],
            "prompt_ids": Ragged.from_rows(prompts, torch.int64),
            "response_ids": Ragged.from_rows(responses, torch.int64),
            "response_mask": Ragged.from_rows(masks, torch.int64),
            **images_column([conversation.images for conversation in conversations]),
        }
    )
