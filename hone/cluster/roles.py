"""Roles of a run with their models and operations, as plain methods over batches."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import load_peft_weights
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hone.algorithms.process_rewards import implicit_rewards
from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Collect, RowGroups, Split, dispatch
from hone.cluster.handles import RoleUpdate
from hone.cluster.weight_broadcast import WeightSource
from hone.config.derived import RunSpec
from hone.config.model import ModelConfig
from hone.config.parallel import ParallelConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.errors import ConfigError
from hone.generation.build import engine_dtype
from hone.generation.options import sends_adapter
from hone.models.heads import Head, PolicyHead, ValueHead
from hone.models.loading import saved_model
from hone.training.backends.local import LocalBackend
from hone.training.backends.protocol import ModelKind, TrainBackend
from hone.training.backends.registry import build_train_backend
from hone.training.checkpoints.checkpoint import model_directory
from hone.training.engine import Outputs, TrainSettings, train_batches
from hone.training.learners import teacher_distance
from hone.training.microbatches import MicroBatchTarget
from hone.training.objectives import (
    DIVISORS,
    LossFn,
    PartialLoss,
    PolicyObjective,
    learns_entropy,
    outcome_objective,
    value_objective,
)
from hone.training.preferences import online_objective
from hone.training.step_profile import profiled_update

log = logging.getLogger("hone")


class ModelRole:
    """Common part of all roles with a training backend."""

    engine: TrainBackend
    _write: Callable[[], None]

    @dispatch(Split.ALL, background=True)
    def write(self) -> None:
        """Write the staged checkpoint, while the role continues."""
        self._write()

    @dispatch(Split.ALL, max)
    def take_busy_seconds(self) -> float:
        """Return seconds in forward, backward and optimizer since the last call, of the slowest worker."""
        return self.engine.take_busy_seconds()


class TrainedModel(ModelRole):
    """A model with its optimizer."""

    name = "actor"  # in checkpoints and profiles
    context: WorkerContext[Any]

    def _load(self, kind: ModelKind, model: ModelConfig, head: Head, parallel: ParallelConfig, **settings: Any) -> None:
        """Load the model with these :class:`TrainSettings`, and with ``resume`` the state of its optimizer. Collective."""
        context, trainer = self.context, self.context.config.trainer
        self.engine = build_train_backend(
            kind,
            model,
            head,
            TrainSettings(
                context.device, total_steps=context.total_steps, deterministic=trainer.deterministic, **settings
            ),
            parallel=parallel,
            meshes=context.meshes,
            seed=trainer.seed,
        )
        if context.resume is not None:
            self.engine.restore(context.resume, self.name)

    def _profiled(self, step: int) -> AbstractContextManager[None]:
        context = self.context
        return profiled_update(context.config.trainer, step + 1, f"{self.name}-{context.rank}", context.device)

    @dispatch(Split.ALL, Collect.FIRST)
    def stage(self, location: str) -> None:
        """Copy weights and optimizer state for the checkpoint at ``location``; :meth:`write` writes them."""
        self._write = self.engine.stage(location, self.name, self._tokenizer())

    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer that is saved with the weights."""
        return self.context.tokenizer


class SupervisedModel(TrainedModel):
    """A model that learns by one objective, which does not change in a step."""

    _objective: LossFn

    @dispatch(Split.ROWS, Collect.FIRST)
    def update(self, batch: Batch, minis: RowGroups, step: int) -> RoleUpdate:
        """Apply the optimizer updates of one step, each of these rows, at this position of the learning-rate schedule."""
        batch = self._inputs(batch)
        with self._profiled(step):
            results, _ = train_batches(self.engine.train_batch, batch, self._objective, minis.groups, step=step)
        return RoleUpdate(results, self.engine.learning_rate(step))

    def _inputs(self, batch: Batch) -> Batch:
        """Return the columns that the model reads."""
        return batch


class PolicyWorker(WeightSource, TrainedModel):
    """The actor: the trained policy, which the native engine samples from.

    Args:
        context: context of the process; with ``resume`` the role resumes from that checkpoint.
    """

    _exported: Iterator[tuple[str, Tensor]] = iter(())
    _held: Sequence[tuple[str, Tensor]] = ()  # the weight that did not fit into the last bucket

    def __init__(self, context: WorkerContext[RLConfig]) -> None:
        config, resume = context.config, context.resume
        self.context, self.config = context, config
        actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
        if resume is not None:
            model = saved_model(model, model_directory(resume, "actor"))
        distillation = config.distillation
        head = PolicyHead(
            config.actor_rollout_ref.rollout.temperature,
            learns_entropy=learns_entropy(actor),
            distance=teacher_distance(config, context.device),
        )
        self._load(
            "policy",
            model,
            head,
            actor,
            optim=actor.optim,
            dtype=actor.dtype,
            max_tokens=actor.ppo_max_token_len_per_gpu,
            max_sequences=actor.ppo_micro_batch_size_per_gpu,
            balances_experts=actor.router_aux_loss_coef > 0,
        )
        self._spec = RunSpec(config)
        self._by_pairs = None
        if actor.preference_loss.loss_mode is not None:
            self._by_pairs = online_objective(actor.preference_loss)
        self._objective = PolicyObjective(
            actor,
            self._spec.correction,
            max_response_length=config.data.max_response_length,
            distillation=distillation if distillation.enable and not distillation.by_advantage else None,
        )

    def close(self) -> None:
        """Drop the connections with the rollout workers."""
        self.leave_broadcast()

    @dispatch(Split.ROWS)
    def log_probs(self, batch: Batch, *, with_entropy: bool = False, with_sum_pi_squared: bool = False) -> Batch:
        """Return ``log_probs`` (``entropy``, ``sum_pi_squared``) of the response tokens under the current weights."""
        head = None
        if with_sum_pi_squared:
            head = PolicyHead(self.config.actor_rollout_ref.rollout.temperature, with_sum_pi_squared=True)
        return Batch(self.engine.infer_batch(batch, with_entropy=with_entropy, head=head))

    @dispatch(Split.ROWS)
    def update(
        self,
        batch: Batch,
        minis: RowGroups,
        step: int,
        *,
        gives_old_log_probs: bool = False,
        keep_last: bool = False,
        entropy_coeff: float | None = None,
    ) -> Batch:
        """Apply all optimizer updates of one step; see :func:`~hone.training.engine.train_batches`.

        ``entropy_coeff``: this step's weight of the entropy bonus, if it is not the configured one.

        Returns:
            The kept columns, and in the metadata ``update``, the :class:`RoleUpdate`.
        """
        self._begin_step(step, entropy_coeff)
        with self._profiled(step):
            results, columns = train_batches(
                self.engine.train_batch,
                batch,
                self._by_pairs or self._objective,
                minis.groups,
                step=step,
                with_entropy=gives_old_log_probs or learns_entropy(self.config.actor_rollout_ref.actor),
                gives_old_log_probs=gives_old_log_probs,
                keep_last=keep_last,
                prepare=self._prepared if self._by_pairs is None and self._objective.needs_preparation else None,
            )
        return Batch(columns, update=RoleUpdate(results, self.engine.learning_rate(step)))

    @dispatch(Split.ROWS)
    def accumulate(self, batch: Batch, step: int, *, first: bool, entropy_coeff: float | None = None) -> Batch:
        """Compute the gradients of a part of the step's only update; return ``log_probs`` and ``entropy`` of its tokens.

        Args:
            step: position in the learning-rate schedule (0 is the first).
            first: whether it is the first part of the step.
        """
        if first:
            self._begin_step(step, entropy_coeff)
            self.engine.begin_update()
            self._partial = PartialLoss(self._objective, DIVISORS[self.config.actor_rollout_ref.actor.loss_agg_mode])
        outputs = Outputs(batch.ragged("response_ids"))
        with self._profiled(step) if first else contextlib.nullcontext():
            self.engine.accumulate(batch, self._partial, with_entropy=True, outputs_seen=outputs)
        return Batch(outputs.columns())

    @dispatch(Split.ALL, Collect.FIRST)
    def apply_gradients(self, step: int) -> RoleUpdate:
        """Apply the gradients of all parts at this position of the learning-rate schedule."""
        return RoleUpdate([self.engine.apply_gradients(step, self._partial)], self.engine.learning_rate(step))

    def engine_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return the current weights for an engine, or the adapter alone; matrices in its dtype: one in bfloat16 takes half the bytes."""
        which = "adapter" if sends_adapter(self.config) else "merged"
        return self.engine.export_weights(which, dtype=getattr(torch, engine_dtype(self.config)))

    @dispatch(Split.ALL, Collect.FIRST)
    def export_weights(self) -> None:
        """Begin a weight sync of :meth:`engine_weights`: :meth:`next_weights` returns the buckets."""
        self._exported, self._held = self.engine_weights(), ()

    @dispatch(Split.ALL, Collect.REMOTE)
    def next_weights(self, max_bytes: int) -> list[tuple[str, Tensor]] | None:
        """Return the next whole weights, at most ``max_bytes`` of them (but at least one); None after the last."""
        bucket, used = [], 0
        for name, tensor in itertools.chain(self._held, self._exported):
            used += tensor.nbytes
            if bucket and used > max_bytes:
                self._held = [(name, tensor)]
                return bucket
            bucket.append((name, tensor))
        self._held = []
        return bucket or None

    def _begin_step(self, step: int, entropy_coeff: float | None) -> None:
        """Set the weight of the entropy bonus; save the next micro-batch if ``trainer.save_microbatch_steps`` names this step."""
        if entropy_coeff is not None:
            self._objective.entropy_coeff = entropy_coeff
        if step + 1 in self.config.trainer.save_microbatch_steps and self.context.rank == 0:
            if not isinstance(self.engine, LocalBackend):
                raise ConfigError(
                    f"{type(self.engine).__name__} cannot save a micro-batch",
                    why="each process has a part of the weights and gradients",
                    where="trainer.save_microbatch_steps",
                    fix="trainer.save_microbatch_steps=[], or a run with one process per model",
                )
            config = copy.deepcopy(self.config)  # with the weight of this step, to compute the same loss again
            if entropy_coeff is not None:
                config.actor_rollout_ref.actor.entropy_coeff = entropy_coeff
                config.actor_rollout_ref.actor.entropy_target = None
            self.engine.save_next_micro_batch(MicroBatchTarget(config, step + 1))

    def _prepared(self, mini: Batch, first: bool) -> Batch:
        """Prepare the loss for a whole mini-batch.

        On the first update the current policy's log-probs are the old ones, unless the engine reported those; later updates
        need a forward pass.
        """
        same = first and not self._spec.bypass
        log_probs = mini.ragged("old_log_probs") if same else self.engine.infer_batch(mini)["log_probs"]
        return self._objective.prepare(mini, log_probs, self.engine.gather_rows)


def build_frozen_policy(context: WorkerContext[Any], model: ModelConfig) -> TrainBackend:
    """Load a policy that is never updated, sharded as the reference. Collective."""
    config: AnyConfig = context.config
    if isinstance(config, RLConfig):
        actor, parallel = config.actor_rollout_ref.actor, RunSpec(config).reference_parallel
        dtype, max_tokens, max_sequences = (
            actor.dtype,
            actor.ppo_max_token_len_per_gpu,
            actor.ppo_micro_batch_size_per_gpu,
        )
        head = PolicyHead(config.actor_rollout_ref.rollout.temperature)
    else:
        dtype, max_tokens, max_sequences, parallel = config.dtype, config.data.max_token_len_per_gpu, None, config
        head = PolicyHead()
    settings = TrainSettings(context.device, dtype=dtype, max_tokens=max_tokens, max_sequences=max_sequences)
    return build_train_backend(
        "frozen", model, head, settings, parallel=parallel, meshes=context.meshes, seed=config.trainer.seed
    )


def first_adapter(model: ModelConfig, wanted: bool) -> dict[str, Tensor] | None:
    """Return the weights of the adapter that the run began with, and say which reference they make; None for the base alone."""
    if model.lora_adapter_path is None:
        return None
    log.info(
        "the reference is '%s' %s its adapter '%s'",
        model.path,
        "with" if wanted else "without",
        model.lora_adapter_path,
    )
    return load_peft_weights(model.lora_adapter_path, device="cpu") if wanted else None


class FrozenPolicy(ModelRole):
    """A reference policy: the ``actor`` with the adapter that it began with (``adapter``) or none, or a frozen ``copy``."""

    def __init__(
        self,
        context: WorkerContext[Any],
        budget: int | None,
        model: ModelConfig,
        copy: ModelConfig | None,
        adapter: bool,
    ) -> None:
        self._budget, self._adapter, self._shared = budget, None, copy is None
        if copy is None:
            self.engine = context.roles["actor"].engine
            self._adapter = first_adapter(model, adapter)
        else:
            self.engine = build_frozen_policy(context, copy)

    @dispatch(Split.ROWS)
    def log_probs(self, batch: Batch) -> Batch:
        """Return ``ref_log_probs`` of the response tokens."""
        with self.engine.reference_mode(self._adapter) if self._shared else contextlib.nullcontext():
            return Batch({"ref_log_probs": self.engine.infer_batch(batch, max_tokens=self._budget)["log_probs"]})


class ReferenceWorker(FrozenPolicy):
    """The reference policy of RL: with LoRA a colocated actor; in another process, or without LoRA, a copy of the initial weights."""

    def __init__(self, context: WorkerContext[RLConfig]) -> None:
        shared = context.config.actor_rollout_ref
        model, ref = shared.model, shared.ref
        with_adapter = model.lora_rank > 0 or model.lora_adapter_path is not None
        copy = None if "actor" in context.roles and with_adapter else model
        super().__init__(context, ref.log_prob_max_token_len_per_gpu, model, copy, ref.adapter == "start")


class CriticWorker(SupervisedModel):
    """The value model and its optimizer.

    Args:
        context: context of the process; with ``resume`` the role resumes from that checkpoint.
    """

    name = "critic"

    def __init__(self, context: WorkerContext[RLConfig]) -> None:
        self.context = context
        actor, critic = context.config.actor_rollout_ref.actor, context.config.critic
        self._load_critic("value", ValueHead())
        self._objective = value_objective(
            cliprange_value=critic.cliprange_value,
            loss_agg_mode=critic.loss_agg_mode or actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor or context.config.data.max_response_length,
        )

    def _load_critic(self, kind: ModelKind, head: Head) -> None:
        config, resume = self.context.config, self.context.resume
        actor, critic, policy = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.model
        path = str(model_directory(resume, "critic")) if resume else critic.model.path or policy.path
        offload = critic.model.enable_activation_offload
        model_config = dataclasses.replace(
            policy,
            path=path,
            lora_rank=0,
            enable_gradient_checkpointing=critic.model.enable_gradient_checkpointing,
            enable_activation_offload=policy.enable_activation_offload if offload is None else offload,
        )
        self._load(
            kind,
            model_config,
            head,
            actor,
            optim=critic.optim,
            dtype=critic.dtype or actor.dtype,
            max_tokens=critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
            max_sequences=actor.ppo_micro_batch_size_per_gpu,
        )

    @dispatch(Split.ROWS)
    def values(self, batch: Batch) -> Batch:
        """Return ``values`` of the state before each response token."""
        return Batch(self.engine.infer_batch(self._inputs(batch)))

    def _inputs(self, batch: Batch) -> Batch:
        """Return the batch without the experts that the policy's routers chose: those of the critic are others."""
        return batch.select(*(name for name in batch.names() if name != "expert_ids"))

    def _tokenizer(self) -> None:
        return None


class ProcessRewardWorker(CriticWorker):
    """The language model of implicit process rewards (:mod:`hone.algorithms.process_rewards`) and its optimizer, in the critic's place."""

    def __init__(self, context: WorkerContext[RLConfig]) -> None:
        self.context, self._beta = context, context.config.critic.beta
        self._load_critic("policy", PolicyHead(context.config.actor_rollout_ref.rollout.temperature))
        self._objective = outcome_objective(self._beta)

    @dispatch(Split.ROWS)
    def values(self, batch: Batch) -> Batch:
        """Return ``process_rewards`` of the response tokens; it reads ``ref_log_probs``."""
        log_probs, reference = self.engine.infer_batch(self._inputs(batch))["log_probs"], batch.ragged("ref_log_probs")
        rewards = implicit_rewards(log_probs.values, reference.values.to(log_probs.values), self._beta)
        return Batch({"process_rewards": Ragged(rewards, log_probs.offsets)})
