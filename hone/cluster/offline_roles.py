"""Roles of `hone sft`, `hone prefer` and `hone reward-model`: the trained model, and the reference policy."""

from __future__ import annotations

import dataclasses

from transformers import PreTrainedTokenizerBase

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Split, dispatch
from hone.cluster.roles import FrozenPolicy, SupervisedModel
from hone.config.offline import PreferenceConfig, RewardModelConfig
from hone.config.specs import OfflineSpec
from hone.config.trees import OfflineConfig
from hone.data.batch import Batch
from hone.models.loading import saved_model, set_tokenizer_padding
from hone.training.checkpoints.checkpoint import model_directory
from hone.training.learners import learner_of


class LearnerWorker(SupervisedModel):
    """The trained model and its optimizer.

    Args:
        context: context of the process; with ``resume`` the role resumes from that checkpoint.
    """

    def __init__(self, context: WorkerContext[OfflineConfig]) -> None:
        config, resume = context.config, context.resume
        self.context = context
        learner = learner_of(config, context.device)
        self._objective = learner.objective
        model = config.model if resume is None else saved_model(config.model, model_directory(resume, "actor"))
        budget = config.data.max_token_len_per_gpu
        self._load(learner.kind, model, learner.head, config, optim=config.optim, dtype=config.dtype, max_tokens=budget)

    @dispatch(Split.ROWS)
    def outputs(self, batch: Batch) -> Batch:
        """Return ``log_probs`` of the response tokens under the current weights, or ``scores`` of a reward model."""
        return Batch(self.engine.infer_batch(batch))

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self.context.tokenizer
        if isinstance(self.context.config, RewardModelConfig):
            set_tokenizer_padding(tokenizer)
        return tokenizer


class FrozenPolicyWorker(FrozenPolicy):
    """The reference policy: the trained model of this process, or a frozen one."""

    def __init__(self, context: WorkerContext[PreferenceConfig]) -> None:
        config, copy = context.config, None
        if not OfflineSpec(config).adapter_is_reference:
            path = config.ref.model_path or config.model.path
            copy = dataclasses.replace(config.model, path=path, lora_rank=0, lora_adapter_path=None)
        budget, adapter = config.ref.log_prob_max_token_len_per_gpu, config.ref.mode != "adapter_off"
        super().__init__(context, budget, config.model, copy, adapter)

    @dispatch(Split.ALL)
    def release(self) -> None:
        """Free the model; the role has no other use after this."""
        del self.engine
