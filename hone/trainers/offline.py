"""Training loop over a fixed dataset: imitation, preferences and reward models.

A step is one optimizer update over ``data.train_batch_size`` rows. Run directory, checkpoints, resume, trackers, runtimes and
restarts are those of RL: the loop calls the roles of :mod:`hone.cluster.offline_roles`, in this process or in the workers of a
cluster. Datasets and validation metrics are in :mod:`hone.trainers.sft` and :mod:`hone.trainers.preference`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from hone.cluster.context import run_image_processor, run_tokenizer
from hone.cluster.dispatch import RowGroups
from hone.cluster.handles import AnyBatch, Learner
from hone.cluster.plan import offline_roles
from hone.cluster.runtime import Runtime
from hone.cluster.supervisor import Supervisor
from hone.config.offline import PreferenceConfig, RewardModelConfig, SFTConfig
from hone.data.batch import Batch
from hone.data.prompts import EpochSampler
from hone.data.seeding import derive_seed
from hone.insight import activity
from hone.insight.metrics import MetricStore
from hone.trainers.launched_session import LaunchedSession
from hone.trainers.session import RunSession, session_steps
from hone.trainers.step_metrics import memory_metrics, update_metrics

ConfigT = TypeVar("ConfigT", SFTConfig, PreferenceConfig | RewardModelConfig)
DataT = TypeVar("DataT")


class OfflineTrainer(ABC, Generic[ConfigT, DataT]):
    """Trainer of one run over a dataset.

    Args:
        supervisor: owner of the run's processes across restarts; None for a run without restarts.
    """

    def __init__(self, config: ConfigT, supervisor: Supervisor | None = None) -> None:
        self.config: ConfigT = config
        self.supervisor = supervisor or Supervisor(Path(), 0)
        begin = LaunchedSession if config.trainer.runtime == "torchrun" else RunSession
        self.session: RunSession | LaunchedSession = begin(config, on_hang=self.supervisor.on_hang)
        resume = self.session.resumed_from
        self.tokenizer = run_tokenizer(config)
        self.image_processor = run_image_processor(config, self.tokenizer)
        data = config.data
        self.dataset: Any = self.open_dataset(data.train_files, data.train_max_samples)
        self.validation: Any = self.open_dataset(data.val_files, data.val_max_samples) if data.val_files else None
        self.sampler = EpochSampler(
            len(self.dataset), data.train_batch_size, shuffle=data.shuffle, seed=config.trainer.seed
        )
        self.total_steps = session_steps(config.trainer, self.sampler.steps_per_epoch)
        self.session.require_steps(self.total_steps)
        self.runtime: Runtime = self.supervisor.runtime(
            config, offline_roles(config), total_steps=self.total_steps, resume=str(resume) if resume else None
        )
        self.actor: Learner = self.runtime.group("actor")
        self.step = 0
        if resume is not None:
            with resume.loading_state() as state:
                self.sampler.load_state_dict(state["sampler"])
            self.step = resume.step

    # abstract methods ------------------------------------------------------------------------------------------------

    @abstractmethod
    def open_dataset(self, files: Any, max_samples: int) -> DataT:
        """Load the rows in ``files``, a path or a list of paths."""

    @abstractmethod
    def batch(self, rows: Sequence[Any]) -> Batch:
        """Convert dataset rows to columns."""

    @abstractmethod
    def measure(self, batch: Batch) -> dict[str, float]:
        """Return ``val/<metric>`` of the validation rows."""

    def prepare(self, batch: Batch, metrics: MetricStore) -> AnyBatch:
        """Give the batch to the runtime, with further inputs of the objective; the default adds none."""
        del metrics
        return self.runtime.put(batch)

    # shared loop -----------------------------------------------------------------------------------------------------

    def fit(self) -> int:
        """Train to the last step, or until a stop request; return the exit code."""
        trainer, session = self.config.trainer, self.session
        with session.running(self.total_steps, self.sampler.steps_per_epoch):
            before = self.step == 0 and trainer.val_before_train and self.validation is not None
            if before and (metrics := self.validate()):
                session.log(0, metrics)
            while self.step < self.total_steps and not session.stop_requested:
                self.step += 1
                with activity.doing(f"step {self.step}"):
                    session.log(self.step, self.train_step())
                if session.save_due(self.step):
                    self.save()
            if session.last_save_due and self.step:
                self.save()
            session.completed(self.step, self.runtime.memory())
        return session.exit_code

    def train_step(self) -> dict[str, float]:
        """Perform one update and return its metrics."""
        started, metrics = time.perf_counter(), MetricStore()
        self.runtime.begin_step(derive_seed(self.config.trainer.seed, "step", self.step))
        rows = self.batch([self.dataset[row] for row in self.sampler.next_batch()])
        batch = self.prepare(rows, metrics)
        with activity.doing("update_actor"), metrics.timer("update_actor"):
            pending = self.actor.update(batch, RowGroups([range(len(batch))]), self.step - 1)
            update = pending.result()
        metrics.update(pending.balance())
        update_metrics(metrics, update.results, "train", update.learning_rate)
        tokens = float(rows.ragged("prompt_ids").lengths.sum() + rows.ragged("response_ids").lengths.sum())
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
        """Return the metrics of the validation rows; empty after a stop request."""
        rows = [self.validation[row] for row in range(len(self.validation))]
        if not isinstance(self.session, RunSession):
            return self.measure(self.batch(rows))
        with self.session.cancelling("validating", len(rows)):
            return self.measure(self.batch(rows))
        return {}

    def outputs(self, batch: AnyBatch) -> Batch:
        """Return the outputs of the trained model for the response tokens, in this process."""
        return self.runtime.fetch(self.actor.outputs(batch).result())

    def save(self) -> None:
        """Write a checkpoint of this step, unless it exists."""
        if (where := self.session.begin_save(self.step)) is not None:
            self.actor.stage(where).result()
            state = {"step": self.step, "sampler": self.sampler.state_dict()}
            self.session.finish_save(self.step, state, lambda: self.actor.write().result())
