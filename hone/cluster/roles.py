"""The roles of a run: who holds which model and what one may ask of it. Plain methods over batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.seeding import derive_seed
from hone.training.correction import correction_settings
from hone.training.engine import TrainEngine, UpdateResult
from hone.training.heads import PolicyHead, ValueHead
from hone.training.model import adapter_off, load_policy, load_value_model, saved_model
from hone.training.objectives import PolicyObjective, value_objective
from hone.training.preferences import online_objective


class PolicyWorker:
    """The actor: the policy that is trained, and that the native engine samples from.

    Args:
        config: of the run.
        device: where it lives.
        total_steps: horizon of the schedule.
        resume: checkpoint directory to go on from, or None.
    """

    def __init__(self, config: RLConfig, *, device: torch.device, total_steps: int, resume: Path | None = None) -> None:
        self.config, self.resume = config, resume
        actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
        if resume is not None:
            model = saved_model(model, resume / "actor")
        self.model = load_policy(model, device=device, seed=config.trainer.seed)
        self.engine = TrainEngine(
            self.model,
            PolicyHead(config.actor_rollout_ref.rollout.temperature),
            optim=actor.optim,
            device=device,
            dtype=actor.dtype,
            max_tokens=actor.ppo_max_token_len_per_gpu,
            max_sequences=actor.ppo_micro_batch_size_per_gpu,
            total_steps=total_steps,
        )
        if resume is not None:
            self.engine.load(resume / "actor_optimizer.safetensors")
        self._correction = correction_settings(config.algorithm.rollout_correction)
        self._by_pairs = None
        if actor.preference_loss.loss_mode is not None:
            self._by_pairs = online_objective(actor.preference_loss)
        self._objective = PolicyObjective(actor, self._correction, max_response_length=config.data.max_response_length)

    def log_probs(self, batch: Batch, *, with_entropy: bool, with_sum_pi_squared: bool = False) -> dict[str, Ragged]:
        """``log_probs`` (``entropy``, ``sum_pi_squared``) of the response tokens under the present weights."""
        head = None
        if with_sum_pi_squared:
            head = PolicyHead(self.config.actor_rollout_ref.rollout.temperature, with_sum_pi_squared=True)
        return self.engine.infer_batch(batch, with_entropy=with_entropy, head=head)

    def update(self, batch: Batch, step: int) -> list[UpdateResult]:
        """All optimizer updates of one step: mini-batches of prompts, ppo_epochs times over."""
        actor, objective = self.config.actor_rollout_ref.actor, self._by_pairs or self._objective
        seed = derive_seed(self.config.trainer.seed, "mini-batches", step) if actor.shuffle else None
        results: list[UpdateResult] = []
        for mini in mini_batches(batch, actor.ppo_mini_batch_size, actor.ppo_epochs, seed):
            if self._by_pairs is None and self._objective.needs_preparation:
                mini = self._prepared(mini, first=not results)
            with_entropy = actor.entropy_coeff > 0
            results.append(self.engine.train_batch(mini, objective, step=step, with_entropy=with_entropy))
        return results

    def _prepared(self, mini: Batch, *, first: bool) -> Batch:
        """Let the loss settle what concerns the whole mini-batch. On the first update the policy is the one whose log-probs
        are the old ones, unless the engine reported those; later it takes a forward pass to know it.
        """
        if first and not self._correction["bypass_mode"]:
            return self._objective.prepare(mini, mini.ragged("old_log_probs"))
        return self._objective.prepare(mini, self.log_probs(mini, with_entropy=False)["log_probs"])

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write weights (a Hugging Face or PEFT directory with tokenizer) and optimizer state."""
        self.engine.save(directory / "actor", directory / "actor_optimizer.safetensors")
        tokenizer.save_pretrained(directory / "actor")


class ReferenceWorker:
    """The reference policy: the actor with its adapter off, or a frozen copy of the starting weights."""

    def __init__(self, config: RLConfig, actor: PolicyWorker, *, device: torch.device) -> None:
        self._budget = config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
        self.engine, self._shared = actor.engine, True
        model = config.actor_rollout_ref.model
        if model.lora_rank == 0 and model.lora_adapter_path is None:
            self._shared = False
            self.engine = TrainEngine(
                load_policy(model, device=device, seed=config.trainer.seed, trainable=False),
                actor.engine.head,
                device=device,
                dtype=actor.engine.dtype,
                max_tokens=actor.engine.max_tokens,
                max_sequences=actor.engine.max_sequences,
            )

    def log_probs(self, batch: Batch) -> Ragged:
        """Log-probs of the response tokens."""
        with adapter_off(self.engine.model) if self._shared else contextlib.nullcontext():
            return self.engine.infer_batch(batch, max_tokens=self._budget)["log_probs"]


class CriticWorker:
    """The value model and its optimizer."""

    def __init__(self, config: RLConfig, *, device: torch.device, total_steps: int, resume: Path | None = None) -> None:
        self.config = config
        actor, critic = config.actor_rollout_ref.actor, config.critic
        policy = config.actor_rollout_ref.model
        path = str(resume / "critic") if resume else critic.model.path or policy.path
        model_config = dataclasses.replace(
            policy, path=path, lora_rank=0, enable_gradient_checkpointing=critic.model.enable_gradient_checkpointing
        )
        self.engine = TrainEngine(
            load_value_model(model_config, device=device),
            ValueHead(),
            optim=critic.optim,
            device=device,
            dtype=critic.dtype or actor.dtype,
            max_tokens=critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
            max_sequences=actor.ppo_micro_batch_size_per_gpu,
            total_steps=total_steps,
        )
        if resume is not None:
            self.engine.load(resume / "critic_optimizer.safetensors")
        self._objective = value_objective(
            cliprange_value=critic.cliprange_value,
            loss_agg_mode=critic.loss_agg_mode or actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        )

    def values(self, batch: Batch) -> Ragged:
        """Value of the state in which each response token was chosen."""
        return self.engine.infer_batch(batch)["values"]

    def update(self, batch: Batch, step: int) -> list[UpdateResult]:
        """All optimizer updates of one step."""
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        size, epochs = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic.ppo_epochs or actor.ppo_epochs
        seed = derive_seed(self.config.trainer.seed, "critic-mini-batches", step) if actor.shuffle else None
        return [
            self.engine.train_batch(mini, self._objective, step=step)
            for mini in mini_batches(batch, size, epochs, seed)
        ]

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state."""
        self.engine.save(directory / "critic", directory / "critic_optimizer.safetensors")


def mini_batches(batch: Batch, prompts: int, epochs: int, seed: int | None) -> Iterator[Batch]:
    """Cut a batch into mini-batches of ``prompts`` prompt groups, ``epochs`` times; shuffled when a seed is given."""
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(batch.objects("uid")):
        groups.setdefault(uid, []).append(row)
    members = list(groups.values())
    for epoch in range(epochs):
        order = list(range(len(members)))
        if seed is not None:
            generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
            order = torch.randperm(len(members), generator=generator).tolist()
        for start in range(0, len(order), prompts):
            yield batch.reorder([row for group in order[start : start + prompts] for row in members[group]])
