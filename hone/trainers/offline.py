"""Training loop over a fixed dataset: imitation, preferences and reward models.

A step is one optimizer update over ``data.train_batch_size`` rows. Run directory, checkpoints, resume and trackers are those of RL.
Model, objective and validation metrics are in :mod:`hone.trainers.sft` and :mod:`hone.trainers.preference`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from hone.cluster.context import prepare_torch
from hone.config.model import ModelConfig
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.sft import SFTConfig
from hone.data.batch import Batch
from hone.data.sampler import EpochSampler
from hone.data.seeding import derive_seed
from hone.data.tokenizer import load_tokenizer
from hone.insight import activity
from hone.insight.metrics import MetricStore
from hone.models.kernels.cpu.memory import MemoryUse
from hone.models.loading import saved_model
from hone.trainers.reporting import memory_metrics, update_metrics
from hone.trainers.session import RunSession, session_steps
from hone.training.backends.protocol import TrainBackend
from hone.training.checkpoints.checkpoint import model_directory
from hone.training.step_profile import profiled_update
from hone.training.updates import LossFn

ConfigT = TypeVar("ConfigT", SFTConfig, PreferenceConfig | RewardModelConfig)
DataT = TypeVar("DataT")


class OfflineTrainer(ABC, Generic[ConfigT, DataT]):
    """Trainer of one run over a dataset.

    Args:
        config: resolved configuration.
    """

    engine: TrainBackend
    objective: LossFn

    def __init__(self, config: ConfigT) -> None:
        self.config: ConfigT = config
        self.session = RunSession(config)
        self.device = prepare_torch(config.trainer)
        self.memory = MemoryUse()
        resume = self.session.resumed_from
        self.tokenizer = load_tokenizer(
            config.model.tokenizer_path or config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            custom_chat_template=config.model.custom_chat_template,
        )
        data = config.data
        self.dataset: Any = self.open_dataset(data.train_files, data.train_max_samples)
        self.validation: Any = self.open_dataset(data.val_files, data.val_max_samples) if data.val_files else None
        self.sampler = EpochSampler(
            len(self.dataset), data.train_batch_size, shuffle=data.shuffle, seed=config.trainer.seed
        )
        self.total_steps = session_steps(config.trainer, self.sampler.steps_per_epoch)
        self.build(
            saved_model(config.model, model_directory(str(resume), "actor")) if resume else config.model, self.device
        )
        self.step = 0
        if resume is not None:
            self.engine.restore(str(resume), "actor")
            with resume.loading_state() as state:
                self.sampler.load_state_dict(state["sampler"])
            self.step = resume.step

    # abstract methods ------------------------------------------------------------------------------------------------

    @abstractmethod
    def open_dataset(self, files: Any, max_samples: int) -> DataT:
        """Load the rows in ``files``, a path or a list of paths."""

    @abstractmethod
    def build(self, model: ModelConfig, device: torch.device) -> None:
        """Load ``model`` (the configured one, or a checkpoint); set ``engine`` and ``objective``."""

    @abstractmethod
    def batch(self, rows: Sequence[Any]) -> Batch:
        """Convert dataset rows to columns."""

    @abstractmethod
    def measure(self, batch: Batch) -> dict[str, float]:
        """Return ``val/<metric>`` of the validation rows."""

    def prepare(self, batch: Batch, metrics: MetricStore) -> Batch:
        """Add further inputs of the objective to the batch; the default adds none."""
        del metrics
        return batch

    # shared loop -----------------------------------------------------------------------------------------------------

    def fit(self) -> int:
        """Train to the last step, or until a stop request; return the exit code."""
        trainer, session = self.config.trainer, self.session
        with session.running(self.total_steps, self.sampler.steps_per_epoch):
            if self.step == 0 and trainer.val_before_train and self.validation is not None:
                session.log(0, self.validate())
            while self.step < self.total_steps and not session.stop_requested:
                self.step += 1
                with activity.doing(f"step {self.step}"):
                    session.log(self.step, self.train_step())
                if session.save_due(self.step):
                    self.save()
            if session.last_save_due:
                self.save()
            session.completed(self.step, {"main[0]": self.memory()})
        return session.exit_code

    def train_step(self) -> dict[str, float]:
        """Perform one update and return its metrics."""
        started, metrics = time.perf_counter(), MetricStore()
        torch.manual_seed(derive_seed(self.config.trainer.seed, "step", self.step))
        batch = self.prepare(self.batch([self.dataset[row] for row in self.sampler.next_batch()]), metrics)
        profiled = profiled_update(self.config.trainer, self.step, "main-0", self.device)
        with activity.doing("update_actor"), metrics.timer("update_actor"), profiled:
            result = self.engine.train_batch(batch, self.objective, step=self.step - 1)
        update_metrics(metrics, [result], "train", self.engine.learning_rate(self.step - 1))
        tokens = float(batch.ragged("prompt_ids").lengths.sum() + batch.ragged("response_ids").lengths.sum())
        metrics.add("train/tokens", tokens)
        metrics.add("training/global_step", self.step)
        metrics.add("training/epoch", self.sampler.epoch)
        if self.validation is not None and self.session.due(self.config.trainer.test_freq, self.step):
            with activity.doing("testing"), metrics.timer("testing"):
                for name, value in self.validate().items():
                    metrics.add(name, value)
        memory_metrics(metrics)
        seconds = time.perf_counter() - started
        metrics.add("timing_s/step", seconds)
        metrics.add("perf/time_per_step", seconds)
        metrics.add("perf/throughput", tokens / seconds)
        return metrics.reduce()

    def validate(self) -> dict[str, float]:
        """Return the metrics of the validation rows."""
        return self.measure(self.batch([self.validation[row] for row in range(len(self.validation))]))

    def save(self) -> None:
        """Write a checkpoint of this step, unless it exists."""
        if (where := self.session.begin_save(self.step)) is not None:
            write = self.engine.stage(where, "actor", self.tokenizer)
            self.session.finish_save(self.step, {"step": self.step, "sampler": self.sampler.state_dict()}, write)
