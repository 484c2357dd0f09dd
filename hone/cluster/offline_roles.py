"""Roles of `hone sft`, `hone prefer` and `hone reward-model`: the trained model, and the reference policy."""

from __future__ import annotations

import contextlib
import dataclasses

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Collect, RowGroups, Split, dispatch
from hone.cluster.roles import ModelRole, RoleUpdate, build_frozen_policy, first_adapter
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.specs import OfflineSpec
from hone.config.trees import OfflineConfig
from hone.data.batch import Batch
from hone.models.loading import saved_model
from hone.models.padding import set_tokenizer_padding
from hone.training.backends.registry import build_train_backend
from hone.training.checkpoints.checkpoint import model_directory
from hone.training.engine import TrainSettings
from hone.training.learners import learner_of
from hone.training.step_profile import profiled_update


class LearnerWorker(ModelRole):
    """The trained model and its optimizer.

    Args:
        context: context of the process; with ``resume`` the role resumes from that checkpoint.
    """

    def __init__(self, context: WorkerContext[OfflineConfig]) -> None:
        config, resume = context.config, context.resume
        self.context, self.config = context, config
        learner = learner_of(config, context.device)
        self._objective = learner.objective
        model = config.model if resume is None else saved_model(config.model, model_directory(resume, "actor"))
        self.engine = build_train_backend(
            learner.kind,
            model,
            learner.head,
            TrainSettings(
                context.device,
                optim=config.optim,
                dtype=config.dtype,
                max_tokens=config.data.max_token_len_per_gpu,
                total_steps=context.total_steps,
                deterministic=config.trainer.deterministic,
            ),
            parallel=config,
            meshes=context.meshes,
            seed=config.trainer.seed,
        )
        if resume is not None:
            self.engine.restore(resume, "actor")

    @dispatch(Split.ROWS)
    def outputs(self, batch: Batch) -> Batch:
        """Return ``log_probs`` of the response tokens under the current weights, or ``scores`` of a reward model."""
        return Batch(self.engine.infer_batch(batch))

    @dispatch(Split.ROWS, Collect.FIRST)
    def update(self, batch: Batch, minis: RowGroups, step: int) -> RoleUpdate:
        """Apply the optimizer updates of one step.

        Args:
            minis: rows of each update.
            step: position in the learning-rate schedule (0 is the first).
        """
        with profiled_update(self.config.trainer, step + 1, f"actor-{self.context.rank}", self.context.device):
            results = [
                self.engine.train_batch(mini, self._objective, step=step) for mini in self._updates(batch, minis)
            ]
        return RoleUpdate(results, self.engine.learning_rate(step))

    @dispatch(Split.ALL, Collect.FIRST)
    def stage(self, location: str) -> None:
        """Copy weights (with the tokenizer) and optimizer state for the checkpoint at ``location``; :meth:`write` writes them."""
        tokenizer = self.context.tokenizer
        if isinstance(self.config, RewardModelConfig):
            set_tokenizer_padding(tokenizer)
        self._write = self.engine.stage(location, "actor", tokenizer)


class FrozenPolicyWorker(ModelRole):
    """The reference policy: the trained model with the adapter it began with or none, or a frozen model.

    Args:
        context: context of the process, which has the role ``actor`` already.
    """

    def __init__(self, context: WorkerContext[PreferenceConfig]) -> None:
        config = context.config
        self._budget, self._adapter = config.ref.log_prob_max_token_len_per_gpu, None
        self._shared = OfflineSpec(config).adapter_is_reference
        if self._shared:
            self.engine = context.roles["actor"].engine
            self._adapter = first_adapter(config.model, config.ref.mode != "adapter_off")
            return
        path = config.ref.model_path or config.model.path
        model = dataclasses.replace(config.model, path=path, lora_rank=0, lora_adapter_path=None)
        self.engine = build_frozen_policy(context, model)

    @dispatch(Split.ROWS)
    def log_probs(self, batch: Batch) -> Batch:
        """Return ``ref_log_probs`` of the response tokens."""
        with self.engine.reference_mode(self._adapter) if self._shared else contextlib.nullcontext():
            return Batch({"ref_log_probs": self.engine.infer_batch(batch, max_tokens=self._budget)["log_probs"]})

    @dispatch(Split.ALL)
    def release(self) -> None:
        """Free the model; the role has no other use after this."""
        del self.engine
