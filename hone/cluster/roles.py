"""The roles of a run: who holds which model and what one may ask of it. Plain methods over batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Collect, RowGroups, Split, dispatch
from hone.data.batch import Batch
from hone.data.seeding import derive_seed
from hone.errors import ConfigError
from hone.generation.options import sends_adapter
from hone.training.build import build_engine
from hone.training.checkpoints.checkpoint import model_directory
from hone.training.correction import correction_settings
from hone.training.engine import Outputs, TrainEngine, UpdateResult
from hone.training.heads import PolicyHead, ValueHead
from hone.training.model import adapter_off, saved_model
from hone.training.objectives import PolicyObjective, value_objective
from hone.training.preferences import online_objective


@dataclass(frozen=True)
class RoleUpdate:
    """All optimizer updates of a role in one step.

    Attributes:
        results: of each update, in order.
        learning_rate: that they were made with.
    """

    results: Sequence[UpdateResult]
    learning_rate: float


class ModelRole:
    """What all roles with an engine have in common."""

    engine: TrainEngine
    _write: Callable[[], None]

    @dispatch(Split.ALL, background=True)
    def write(self) -> None:
        """Write what was staged, while the role goes on."""
        self._write()

    @dispatch(Split.ALL, max)
    def take_busy_seconds(self) -> float:
        """Seconds in forward, backward and optimizer since the last call, of the slowest worker."""
        return self.engine.take_busy_seconds()

    def _updates(self, batch: Batch, minis: RowGroups) -> Iterator[Batch]:
        """The mini-batches as far as their rows are here."""
        for rows in minis:
            yield batch.reorder(rows)


class PolicyWorker(ModelRole):
    """The actor: the policy that is trained, and that the native engine samples from.

    Args:
        context: of the process; with ``resume`` the role goes on from that checkpoint.
    """

    def __init__(self, context: WorkerContext) -> None:
        config, device, resume = context.config, context.device, context.resume
        self.context, self.config = context, config
        actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
        if resume is not None:
            model = saved_model(model, model_directory(resume, "actor"))
        self.engine = build_engine(
            "policy",
            model,
            PolicyHead(config.actor_rollout_ref.rollout.temperature, learns_entropy=actor.entropy_coeff > 0),
            parallel=actor,
            meshes=context.meshes,
            seed=config.trainer.seed,
            device=device,
            optim=actor.optim,
            dtype=actor.dtype,
            max_tokens=actor.ppo_max_token_len_per_gpu,
            max_sequences=actor.ppo_micro_batch_size_per_gpu,
            total_steps=context.total_steps,
        )
        if resume is not None:
            self.engine.restore(resume, "actor")
        self._correction = correction_settings(config.algorithm.rollout_correction)
        self._by_pairs = None
        if actor.preference_loss.loss_mode is not None:
            self._by_pairs = online_objective(actor.preference_loss)
        self._objective = PolicyObjective(actor, self._correction, max_response_length=config.data.max_response_length)
        if self._objective.needs_preparation and context.layout.dp_size > 1:
            raise ConfigError(
                f"policy loss '{actor.policy_loss.loss_mode}' compares tokens across the whole mini-batch, and "
                f"{context.layout.dp_size} data-parallel ranks have a part of it each",
                why="every rank would choose among its own tokens, and the result depend on the number of ranks",
                fix="trainer.nnodes=1 trainer.n_gpus_per_node=1, or another actor_rollout_ref.actor.policy_loss.loss_mode",
                where="actor_rollout_ref.actor.policy_loss.loss_mode",
            )
        self._exported: Iterator[tuple[str, Tensor]] = iter(())

    @dispatch(Split.ROWS)
    def log_probs(self, batch: Batch, *, with_entropy: bool = False, with_sum_pi_squared: bool = False) -> Batch:
        """``log_probs`` (``entropy``, ``sum_pi_squared``) of the response tokens under the present weights."""
        head = None
        if with_sum_pi_squared:
            head = PolicyHead(self.config.actor_rollout_ref.rollout.temperature, with_sum_pi_squared=True)
        return Batch(self.engine.infer_batch(batch, with_entropy=with_entropy, head=head))

    @dispatch(Split.ROWS, Collect.FIRST)
    def update(self, batch: Batch, minis: RowGroups, step: int) -> RoleUpdate:
        """All optimizer updates of one step.

        Args:
            batch: the step's.
            minis: rows of each mini-batch, in the order of the updates.
            step: position in the learning-rate schedule (0 is the first).
        """
        objective, with_entropy = (
            self._by_pairs or self._objective,
            self.config.actor_rollout_ref.actor.entropy_coeff > 0,
        )
        results: list[UpdateResult] = []
        for mini in self._updates(batch, minis):
            if self._by_pairs is None and self._objective.needs_preparation:
                mini = self._prepared(mini, first=not results)
            results.append(self.engine.train_batch(mini, objective, step=step, with_entropy=with_entropy))
        return RoleUpdate(results, self.engine.learning_rate(step))

    @dispatch(Split.ROWS)
    def update_once(self, batch: Batch, step: int) -> Batch:
        """The one optimizer update of a step, from all its rows, which need no old log-probs.

        Args:
            batch: the step's.
            step: position in the learning-rate schedule (0 is the first).

        Returns:
            ``log_probs`` and ``entropy`` of the response tokens as the update's own pass gave them, before the weights changed;
            and ``update`` in the metadata, the :class:`RoleUpdate`.
        """
        seen = Outputs(batch.ragged("response_ids"))
        result = self.engine.train_batch(batch, self._objective, step=step, with_entropy=True, outputs_seen=seen)
        return Batch(seen.columns(), update=RoleUpdate([result], self.engine.learning_rate(step)))

    @dispatch(Split.ALL, Collect.FIRST)
    def export_weights(self) -> None:
        """Begin to publish the present weights, or the adapter alone: :meth:`next_weights` gives them bucket by bucket."""
        self._exported = self.engine.export_weights("adapter" if sends_adapter(self.config) else "merged")

    @dispatch(Split.ALL, Collect.KEPT)
    def next_weights(self, max_bytes: int) -> list[tuple[str, Tensor]] | None:
        """The next weights, whole, at most ``max_bytes`` of them (but at least one); None when all have been given."""
        bucket, used = [], 0
        for name, tensor in self._exported:
            bucket.append((name, tensor))
            used += tensor.nbytes
            if used >= max_bytes:
                break
        return bucket or None

    def _prepared(self, mini: Batch, *, first: bool) -> Batch:
        """Let the loss settle what concerns the whole mini-batch. On the first update the policy is the one whose log-probs
        are the old ones, unless the engine reported those; later it takes a forward pass to know it.
        """
        if first and not self._correction["bypass_mode"]:
            return self._objective.prepare(mini, mini.ragged("old_log_probs"), self.engine.whole_batch)
        return self._objective.prepare(mini, self.engine.infer_batch(mini)["log_probs"], self.engine.whole_batch)

    @dispatch(Split.ALL, Collect.FIRST)
    def stage(self, location: str) -> None:
        """Copy weights (with the tokenizer) and optimizer state for the checkpoint at ``location``; :meth:`write` writes."""
        self._write = self.engine.stage(location, "actor", self.context.tokenizer)


class ReferenceWorker(ModelRole):
    """The reference policy: the actor with its adapter off, or a frozen copy of the starting weights.

    Args:
        context: of the process. With LoRA the actor in the same process is the reference too; apart from the actor, or
            without LoRA, it is a copy.
    """

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
        policy = context.roles.get("actor")
        self._budget = config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
        self._shared = policy is not None and (model.lora_rank > 0 or model.lora_adapter_path is not None)
        if policy is not None and self._shared:
            self.engine = policy.engine
            return
        self.engine = build_engine(
            "frozen",
            model,
            PolicyHead(config.actor_rollout_ref.rollout.temperature),
            parallel=actor,
            meshes=context.meshes,
            seed=config.trainer.seed,
            device=context.device,
            dtype=actor.dtype,
            max_tokens=actor.ppo_max_token_len_per_gpu,
            max_sequences=actor.ppo_micro_batch_size_per_gpu,
        )

    @dispatch(Split.ROWS)
    def log_probs(self, batch: Batch) -> Batch:
        """``ref_log_probs`` of the response tokens."""
        with adapter_off(self.engine.model) if self._shared else contextlib.nullcontext():
            return Batch({"ref_log_probs": self.engine.infer_batch(batch, max_tokens=self._budget)["log_probs"]})


class CriticWorker(ModelRole):
    """The value model and its optimizer.

    Args:
        context: of the process; with ``resume`` the role goes on from that checkpoint.
    """

    def __init__(self, context: WorkerContext) -> None:
        config, device, resume = context.config, context.device, context.resume
        self.config = config
        actor, critic = config.actor_rollout_ref.actor, config.critic
        policy = config.actor_rollout_ref.model
        path = str(model_directory(resume, "critic")) if resume else critic.model.path or policy.path
        model_config = dataclasses.replace(
            policy, path=path, lora_rank=0, enable_gradient_checkpointing=critic.model.enable_gradient_checkpointing
        )
        self.engine = build_engine(
            "value",
            model_config,
            ValueHead(),
            parallel=actor,
            meshes=context.meshes,
            seed=config.trainer.seed,
            device=device,
            optim=critic.optim,
            dtype=critic.dtype or actor.dtype,
            max_tokens=critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
            max_sequences=actor.ppo_micro_batch_size_per_gpu,
            total_steps=context.total_steps,
        )
        if resume is not None:
            self.engine.restore(resume, "critic")
        self._objective = value_objective(
            cliprange_value=critic.cliprange_value,
            loss_agg_mode=critic.loss_agg_mode or actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        )

    @dispatch(Split.ROWS)
    def values(self, batch: Batch) -> Batch:
        """``values`` of the state in which each response token was chosen."""
        return Batch(self.engine.infer_batch(batch))

    @dispatch(Split.ROWS, Collect.FIRST)
    def update(self, batch: Batch, minis: RowGroups, step: int) -> RoleUpdate:
        """All optimizer updates of one step; as of :meth:`PolicyWorker.update`."""
        results = [self.engine.train_batch(mini, self._objective, step=step) for mini in self._updates(batch, minis)]
        return RoleUpdate(results, self.engine.learning_rate(step))

    @dispatch(Split.ALL, Collect.FIRST)
    def stage(self, location: str) -> None:
        """Copy weights and optimizer state for the checkpoint at ``location``; :meth:`write` writes them."""
        self._write = self.engine.stage(location, "critic")


def mini_batches(uids: Sequence[str], prompts: int, epochs: int, seed: int | None) -> RowGroups:
    """Cut a batch into mini-batches of ``prompts`` prompt groups, ``epochs`` times; shuffled when a seed is given.

    Args:
        uids: prompt group of each row.
    """
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(uid, []).append(row)
    members = list(groups.values())
    minis: list[list[int]] = []
    for epoch in range(epochs):
        order = list(range(len(members)))
        if seed is not None:
            generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
            order = torch.randperm(len(members), generator=generator).tolist()
        for start in range(0, len(order), prompts):
            minis.append([row for group in order[start : start + prompts] for row in members[group]])
    return RowGroups(minis)
