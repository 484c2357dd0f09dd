"""The SFT trainer: imitate the assistant turns of conversations.

A step is one optimizer update over data.train_batch_size conversations; the loss is the mean over assistant tokens.
Run directory, checkpoints, resume and trackers are those of RL.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hone.config.tree import SFTConfig
from hone.data.batch import Batch
from hone.data.conversations import Conversation, ConversationDataset
from hone.data.ragged import Ragged
from hone.data.sampler import EpochSampler
from hone.data.seeding import derive_seed
from hone.data.tokenizer import load_tokenizer
from hone.insight.metrics import MetricStore
from hone.trainers.inputs import file_list
from hone.trainers.reporting import memory_metrics, update_metrics
from hone.trainers.session import RunSession, prepare_torch, session_steps
from hone.training.engine import TrainEngine
from hone.training.heads import PolicyHead
from hone.training.model import load_policy, saved_model
from hone.training.objectives import imitation_objective


def train(config: SFTConfig) -> int:
    """Run `hone sft` and return the exit code."""
    return SFTTrainer(config).fit()


class SFTTrainer:
    """One supervised run.

    Args:
        config: the resolved configuration.
    """

    def __init__(self, config: SFTConfig) -> None:
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
        self.engine = TrainEngine(
            load_policy(model, device=device, seed=config.trainer.seed),
            PolicyHead(),
            optim=config.optim,
            device=device,
            dtype=config.dtype,
            max_tokens=config.data.max_token_len_per_gpu,
            total_steps=self.total_steps,
        )
        self.step = 0
        if resume is not None:
            self.engine.load(resume.path / "actor_optimizer.safetensors")
            self.sampler.load_state_dict(resume.state["sampler"])
            self.step = resume.step
        self._objective = imitation_objective()

    def fit(self) -> int:
        """Train to the last step, or until told to stop."""
        trainer, session = self.config.trainer, self.session
        with session.running(self.total_steps):
            if self.step == 0 and trainer.val_before_train and self.validation is not None:
                session.log(0, {"val/loss": self.validation_loss()})
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
        batch = conversation_batch([self.dataset[row] for row in self.sampler.next_batch()])
        with metrics.timer("update_actor"):
            result = self.engine.train_batch(batch, self._objective, step=self.step - 1)
        update_metrics(metrics, [result], "train", self.engine.learning_rate(self.step - 1))
        tokens = float(batch.ragged("prompt_ids").lengths.sum() + batch.ragged("response_ids").lengths.sum())
        metrics.add("train/tokens", tokens)
        metrics.add("training/global_step", self.step)
        metrics.add("training/epoch", self.sampler.epoch)
        if self.validation is not None and self.session.due(self.config.trainer.test_freq, self.step):
            with metrics.timer("testing"):
                metrics.add("val/loss", self.validation_loss())
        memory_metrics(metrics)
        seconds = time.perf_counter() - started
        metrics.add("perf/time_per_step", seconds)
        metrics.add("perf/throughput", tokens / seconds)
        return metrics.reduce()

    def validation_loss(self) -> float:
        """Mean negative log-likelihood of the assistant tokens of the validation set."""
        assert self.validation is not None
        batch = conversation_batch([self.validation[row] for row in range(len(self.validation))])
        mask = batch.ragged("response_mask").values.bool()
        return float(-self.engine.infer_batch(batch)["log_probs"].values[mask].mean())

    def save(self) -> None:
        """Write a checkpoint of this step."""

        def write(directory: Path) -> None:
            self.engine.save(directory / "actor", directory / "actor_optimizer.safetensors")
            self.tokenizer.save_pretrained(directory / "actor")

        self.session.save(self.step, {"step": self.step, "sampler": self.sampler.state_dict()}, write)

    def _dataset(self, files: Any, max_samples: int) -> ConversationDataset:
        data = self.config.data
        return ConversationDataset(
            file_list(files),
            self.tokenizer,
            messages_key=data.messages_key,
            max_length=data.max_length,
            truncation=data.truncation,
            max_samples=max_samples,
            chat_template_kwargs=data.apply_chat_template_kwargs,
        )


def conversation_batch(conversations: Sequence[Conversation]) -> Batch:
    """A batch in which the "prompt" ends before the first token of the loss; what follows the last is left out."""
    prompts, responses, masks = [], [], []
    for conversation in conversations:
        first = conversation.loss_mask.index(1)
        last = len(conversation.loss_mask) - conversation.loss_mask[::-1].index(1)
        prompts.append(conversation.input_ids[:first])
        responses.append(conversation.input_ids[first:last])
        masks.append(conversation.loss_mask[first:last])
    return Batch(
        {
            "prompt_ids": Ragged.from_rows(prompts, torch.int64),
            "response_ids": Ragged.from_rows(responses, torch.int64),
            "response_mask": Ragged.from_rows(masks, torch.int64),
        }
    )
