"""What `hone prefer` and `hone reward-model` do differently: the model, its objective, and what it is measured by."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hone.algorithms import preference_losses
from hone.config.model import ModelConfig
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.data.batch import Batch
from hone.data.preferences import PreferenceDataset, preference_batch
from hone.errors import DataError
from hone.training.engine import TrainEngine
from hone.training.heads import PolicyHead
from hone.training.model import causal_lm, load_policy, load_reward_model
from hone.training.preferences import Reference, kl_estimate, measure, preference_objective
from hone.training.reward_model import ScoreHead, bradley_terry, bradley_terry_objective, response_scores

CHUNK = 1024
"""Rows that the reference is precomputed for at a time."""


class PolicyLearner:
    """A policy that learns from preferences.

    Attributes:
        engine: holds the policy.
        objective: of an update.
        needs_pairs: whether rows have to be pairs.

    Args:
        config: of the run.
        model: what to load; ``config.model``, or a checkpoint.
        device: where it lives.
        total_steps: horizon of the schedule.
    """

    def __init__(self, config: PreferenceConfig, model: ModelConfig, device: torch.device, total_steps: int) -> None:
        self.loss = preference_losses.get(config.loss.name)
        settings = {name: value for name, value in vars(config.loss).items() if name != "name"}
        self.options = {name: value for name, value in settings.items() if value is not None}
        self.needs_pairs = "pairs" in self.loss.needs
        self.objective = preference_objective(self.loss, self.options)
        self.engine = TrainEngine(
            load_policy(model, device=device, seed=config.trainer.seed),
            PolicyHead(),
            optim=config.optim,
            device=device,
            dtype=config.dtype,
            max_tokens=config.data.max_token_len_per_gpu,
            offload_activations=config.model.enable_activation_offload,
            total_steps=total_steps,
        )
        self.reference = Reference(config, self.engine) if "reference" in self.loss.needs else None
        self._precompute = config.ref.mode == "precompute"

    def read(self, *datasets: PreferenceDataset) -> None:
        """Precompute the reference's log-probs of all rows, where asked for, and let the reference go."""
        if self.reference is None or not self._precompute:
            return
        for dataset in datasets:
            for start in range(0, len(dataset), CHUNK):
                rows = [dataset[row] for row in range(start, min(start + CHUNK, len(dataset)))]
                found = self.reference.log_probs(preference_batch(rows)).to_lists()
                for (_, response), log_probs in zip(
                    (side for row in rows for side in row.responses), found, strict=True
                ):
                    response.ref_log_probs = log_probs
        self.reference = None

    def prepare(self, batch: Batch) -> Batch:
        """Add what the loss needs besides the policy: the reference's log-probs, and the KL estimate."""
        if self.reference is not None:
            batch = batch.with_columns(ref_log_probs=self.reference.log_probs(batch))
            if "kl" in self.loss.needs:
                batch.meta["kl"] = kl_estimate(self.engine, self.reference, batch)
        return batch

    def evaluate(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of a whole held-out set."""
        batch = self.prepare(batch)
        loss, metrics, _ = measure(self.loss, self.engine.infer_batch(batch)["log_probs"], batch, self.options)
        return loss, metrics


class RewardModelLearner:
    """A scalar model that learns to score the chosen response higher. Attributes and arguments as of
    :class:`PolicyLearner`.
    """

    needs_pairs = True

    def __init__(self, config: RewardModelConfig, model: ModelConfig, device: torch.device, total_steps: int) -> None:
        self.centering = config.loss.centering_coeff
        self.objective = bradley_terry_objective(self.centering)
        self.engine = TrainEngine(
            load_reward_model(model, device=device),
            ScoreHead(),
            optim=config.optim,
            device=device,
            dtype=config.dtype,
            max_tokens=config.data.max_token_len_per_gpu,
            offload_activations=config.model.enable_activation_offload,
            total_steps=total_steps,
        )

    def pad_with(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the padding token into the model's settings, so that transformers finds the last token of padded rows. Where
        padding is the end-of-sequence token it would look one token early: then it is left out, and transformers takes
        one row at a time.
        """
        pad = tokenizer.pad_token_id
        causal_lm(self.engine.model).config.pad_token_id = None if pad == tokenizer.eos_token_id else pad

    def read(self, *datasets: PreferenceDataset) -> None:
        """Nothing is needed of the data beforehand."""

    def prepare(self, batch: Batch) -> Batch:
        """Nothing is needed besides the model."""
        return batch

    def evaluate(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of a whole held-out set."""
        return bradley_terry(response_scores(self.engine, batch), batch, self.centering)


def require_fitting(learner: PolicyLearner | RewardModelLearner, dataset: PreferenceDataset, what: str) -> None:
    """Check that the data are of the kind that the loss learns from.

    Raises:
        DataError: pairs are needed and rows have labels; or all labels are the same.
    """
    if learner.needs_pairs and not dataset.paired:
        raise DataError(
            f"the rows of {what} are labelled single responses, and the loss compares pairs",
            fix="loss.name=kto, or data with columns chosen and rejected",
            where=what,
        )
    good, bad = dataset.labels()
    if not good or not bad:
        raise DataError(
            f"all {good + bad} labels of {what} are {'true' if good else 'false'}",
            why="a preference needs something to be preferred to",
            fix="add responses of the other kind",
            where=what,
        )
