"""The trainer of `hone prefer` and `hone reward-model`: learning from preferences, of a policy or of a scalar model.

A step is one optimizer update over data.train_batch_size rows (pairs, or labelled responses). Run directory, checkpoints,
resume and trackers are those of the other trainers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.data.preferences import PreferenceDataset, preference_batch, preference_columns
from hone.data.sampler import EpochSampler
from hone.data.seeding import derive_seed
from hone.data.tokenizer import load_tokenizer
from hone.insight.metrics import MetricStore
from hone.trainers.inputs import file_list
from hone.trainers.preference_learners import PolicyLearner, RewardModelLearner, require_fitting
from hone.trainers.reporting import memory_metrics, update_metrics
from hone.trainers.session import RunSession, prepare_torch, session_steps
from hone.training.model import saved_model


def train(config: PreferenceConfig | RewardModelConfig) -> int:
    """Run `hone prefer` or `hone reward-model` and return the exit code."""
    return PreferenceTrainer(config).fit()


class PreferenceTrainer:
    """One run over preferences.

    Args:
        config: the resolved configuration; its kind decides what is trained.
    """

    def __init__(self, config: PreferenceConfig | RewardModelConfig) -> None:
        self.config = config
        self.session = RunSession(config)
        device = prepare_torch(config.trainer)
        resume = self.session.resumed_from
        self.tokenizer = load_tokenizer(
            config.model.tokenizer_path or config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            custom_chat_template=config.model.custom_chat_template,
        )
        self.dataset = self._dataset(config.data.train_files, config.data.train_max_samples)
        self.validation = (
            self._dataset(config.data.val_files, config.data.val_max_samples) if config.data.val_files else None
        )
        self.sampler = EpochSampler(
            len(self.dataset), config.data.train_batch_size, shuffle=config.data.shuffle, seed=config.trainer.seed
        )
        self.total_steps = session_steps(config.trainer, self.sampler.steps_per_epoch)
        model = saved_model(config.model, resume.path / "actor") if resume else config.model
        if isinstance(config, PreferenceConfig):
            self.learner = PolicyLearner(config, model, device, self.total_steps)
        else:
            self.learner = RewardModelLearner(config, model, device, self.total_steps)
            self.learner.pad_with(self.tokenizer)
        self.engine = self.learner.engine
        require_fitting(self.learner, self.dataset, "data.train_files")
        if self.validation is not None:
            require_fitting(self.learner, self.validation, "data.val_files")
        self.learner.read(*(data for data in (self.dataset, self.validation) if data is not None))
        self.step = 0
        if resume is not None:
            self.engine.load(resume.path / "actor_optimizer.safetensors")
            self.sampler.load_state_dict(resume.state["sampler"])
            self.step = resume.step

    def fit(self) -> int:
        """Train to the last step, or until told to stop."""
        trainer, session = self.config.trainer, self.session
        with session.running(self.total_steps):
            if self.step == 0 and trainer.val_before_train and self.validation is not None:
                session.log(0, self.validate())
            while self.step < self.total_steps and not session.stop_requested:
                self.step += 1
                session.log(self.step, self.train_step())
                if session.save_due(self.step):
                    self.save()
            if session.last_save_due:
                self.save()
            session.completed(self.step)
        return session.exit_code

    def train_step(self) -> dict[str, float]:
        """One update; returns its metrics."""
        started, metrics = time.perf_counter(), MetricStore()
        torch.manual_seed(derive_seed(self.config.trainer.seed, "step", self.step))
        batch = preference_batch([self.dataset[row] for row in self.sampler.next_batch()])
        with metrics.timer("ref"):
            batch = self.learner.prepare(batch)
        with metrics.timer("update_actor"):
            result = self.engine.train_batch(batch, self.learner.objective, step=self.step - 1)
        update_metrics(metrics, [result], "train", self.engine.learning_rate(self.step - 1))
        tokens = float(batch.ragged("prompt_ids").lengths.sum() + batch.ragged("response_ids").lengths.sum())
        metrics.add("train/tokens", tokens)
        metrics.add("training/global_step", self.step)
        metrics.add("training/epoch", self.sampler.epoch)
        if self.validation is not None and self.session.due(self.config.trainer.test_freq, self.step):
            with metrics.timer("testing"):
                for name, value in self.validate().items():
                    metrics.add(name, value)
        memory_metrics(metrics)
        seconds = time.perf_counter() - started
        metrics.add("perf/time_per_step", seconds)
        metrics.add("perf/throughput", tokens / seconds)
        return metrics.reduce()

    def validate(self) -> dict[str, float]:
        """``val/loss`` and the metrics of the held-out rows as ``val/<metric>``."""
        assert self.validation is not None
        batch = preference_batch([self.validation[row] for row in range(len(self.validation))])
        loss, metrics = self.learner.evaluate(batch)
        return {"val/loss": float(loss), **{f"val/{name}": float(value) for name, value in metrics.items()}}

    def save(self) -> None:
        """Write a checkpoint of this step."""

        def write(directory: Path) -> None:
            self.engine.save(directory / "actor", directory / "actor_optimizer.safetensors")
            self.tokenizer.save_pretrained(directory / "actor")

        self.session.save(self.step, {"step": self.step, "sampler": self.sampler.state_dict()}, write)

    def _dataset(self, files: Any, max_samples: int) -> PreferenceDataset:
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
        )
