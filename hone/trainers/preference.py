"""Trainer of `hone prefer` and `hone reward-model`: a policy or scalar model learns from preferences.

A row is a pair of responses or a labelled response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hone.config.model import ModelConfig
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.data.batch import Batch
from hone.data.custom import row_reader
from hone.data.preferences import PreferenceDataset, preference_batch, preference_columns
from hone.insight.metrics import MetricStore
from hone.trainers.inputs import file_list
from hone.trainers.offline import OfflineTrainer
from hone.trainers.preference_learners import PolicyLearner, RewardModelLearner, require_fitting


def train(config: PreferenceConfig | RewardModelConfig) -> int:
    """Run `hone prefer` or `hone reward-model` and return the exit code."""
    return PreferenceTrainer(config).fit()


class PreferenceTrainer(OfflineTrainer[PreferenceConfig | RewardModelConfig, PreferenceDataset]):
    """Trainer of one run over preferences; the configuration's class decides what is trained."""

    def open_dataset(self, files: Any, max_samples: int) -> PreferenceDataset:
        """Load the preferences in ``files``."""
        data = self.config.data
        margin = None if isinstance(self.config, PreferenceConfig) else self.config.loss.margin_key
        return PreferenceDataset(
            file_list(files),
            self.tokenizer,
            preference_columns(data, margin),
            max_length=data.max_length,
            truncation=data.truncation,
            max_samples=max_samples,
            chat_template_kwargs=data.apply_chat_template_kwargs,
            read=row_reader(data.custom_cls, data, self.tokenizer),
        )

    def build(self, model: ModelConfig, device: torch.device) -> None:
        """Build the learner and check that the data fit it.

        Raises:
            DataError: the data do not fit the learner.
        """
        config = self.config
        if isinstance(config, PreferenceConfig):
            self.learner = PolicyLearner(config, model, device, self.total_steps)
        else:
            self.learner = RewardModelLearner(config, model, device, self.total_steps, self.tokenizer)
        self.engine, self.objective = self.learner.engine, self.learner.objective
        require_fitting(self.learner, self.dataset, "data.train_files")
        if self.validation is not None:
            require_fitting(self.learner, self.validation, "data.val_files")
        self.learner.read(*(data for data in (self.dataset, self.validation) if data is not None))

    def batch(self, rows: Sequence[Any]) -> Batch:
        """Convert rows to columns with :func:`~hone.data.preferences.preference_batch`."""
        return preference_batch(rows)

    def prepare(self, batch: Batch, metrics: MetricStore) -> Batch:
        """Add the reference's columns that the learner needs."""
        with metrics.timer("ref"):
            return self.learner.prepare(batch)

    def measure(self, batch: Batch) -> dict[str, float]:
        """Return ``val/loss``, and the metrics of the loss as ``val/<metric>``."""
        loss, metrics = self.learner.evaluate(batch)
        return {"val/loss": float(loss), **{f"val/{name}": float(value) for name, value in metrics.items()}}
