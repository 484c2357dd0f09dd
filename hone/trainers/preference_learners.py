"""Learners of `hone prefer` and `hone reward-model`: model, objective and validation metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hone.algorithms import preference_losses
from hone.config.model import ModelConfig
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.data.batch import Batch
from hone.data.chat import render_prompt
from hone.data.preferences import PreferenceDataset, preference_batch
from hone.errors import DataError
from hone.models.heads import PolicyHead
from hone.models.loading import causal_lm, load_policy, load_reward_model
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.preferences import Reference, kl_estimate, measure, preference_objective
from hone.training.reward_model import ScoreHead, bradley_terry, bradley_terry_objective, response_scores

CHUNK = 1024
"""Rows per chunk when the reference is precomputed."""


class PolicyLearner:
    """Policy that learns from preferences.

    Attributes:
        engine: training backend with the policy.
        objective: objective of an update.
        needs_pairs: True if rows must be pairs.

    Args:
        config: configuration of the run.
        model: model to load: ``config.model`` or a checkpoint.
        device: device of the model.
        total_steps: horizon of the schedule.
    """

    def __init__(self, config: PreferenceConfig, model: ModelConfig, device: torch.device, total_steps: int) -> None:
        self.loss = preference_losses.get(config.loss.name)
        settings = {name: value for name, value in vars(config.loss).items() if name != "name"}
        self.options = {name: value for name, value in settings.items() if value is not None}
        self.needs_pairs = "pairs" in self.loss.needs
        self.objective = preference_objective(self.loss, self.options)
        self.engine = LocalBackend(
            load_policy(model, device=device, seed=config.trainer.seed),
            PolicyHead(),
            TrainSettings(
                device,
                optim=config.optim,
                dtype=config.dtype,
                max_tokens=config.data.max_token_len_per_gpu,
                offload_activations=config.model.enable_activation_offload,
                compile_layers=config.model.compile_layers,
                total_steps=total_steps,
            ),
        )
        self.reference = Reference(config, self.engine, device) if "reference" in self.loss.needs else None
        self._precompute = config.ref.mode == "precompute"

    def read(self, *datasets: PreferenceDataset) -> None:
        """Precompute the reference's log-probs of all rows, if configured, and free the reference."""
        if self.reference is None or not self._precompute:
            return
        for dataset in datasets:
            for start in range(0, len(dataset), CHUNK):
                rows = [dataset[row] for row in range(start, min(start + CHUNK, len(dataset)))]
                rows_log_probs = self.reference.log_probs(preference_batch(rows)).to_lists()
                for (_, response), log_probs in zip(
                    (side for row in rows for side in row.responses), rows_log_probs, strict=True
                ):
                    response.ref_log_probs = log_probs
        self.reference = None

    def prepare(self, batch: Batch) -> Batch:
        """Add the reference's log-probs and the KL estimate, as the loss needs."""
        if self.reference is not None:
            batch = batch.with_columns(ref_log_probs=self.reference.log_probs(batch))
            if "kl" in self.loss.needs:
                batch.meta["kl"] = kl_estimate(self.engine, self.reference, batch)
        return batch

    def evaluate(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of the validation set."""
        batch = self.prepare(batch)
        loss, metrics, _ = measure(self.loss, self.engine.infer_batch(batch)["log_probs"], batch, self.options)
        return loss, metrics


class RewardModelLearner:
    """Scalar model that learns to score the chosen response higher.

    Attributes and arguments as of :class:`PolicyLearner`.

    Args:
        tokenizer: tokenizer whose padding token :func:`set_padding` writes into the model's config.
    """

    needs_pairs = True

    def __init__(
        self,
        config: RewardModelConfig,
        model: ModelConfig,
        device: torch.device,
        total_steps: int,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.centering = config.loss.centering_coeff
        self.objective = bradley_terry_objective(self.centering)
        scalar = load_reward_model(model, device=device, seed=config.trainer.seed)
        set_padding(scalar, tokenizer)
        self.engine = LocalBackend(
            scalar,
            ScoreHead(),
            TrainSettings(
                device,
                optim=config.optim,
                dtype=config.dtype,
                max_tokens=config.data.max_token_len_per_gpu,
                offload_activations=config.model.enable_activation_offload,
                compile_layers=config.model.compile_layers,
                total_steps=total_steps,
            ),
        )

    def read(self, *datasets: PreferenceDataset) -> None:
        """Do nothing; this learner needs no data in advance."""

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch unchanged; this learner needs no further columns."""
        return batch

    def evaluate(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of the validation set."""
        return bradley_terry(response_scores(self.engine, batch), batch, self.centering)


def set_padding(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a padding token into the model's config and the tokenizer; transformers finds the last token of a padded row by it.

    The end-of-sequence token cannot be that token, because transformers would find the score one token too early. Without any
    usable token none is set, and transformers scores one row at a time.
    """
    pad = padding_token(tokenizer)
    if pad is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    causal_lm(model).config.pad_token_id = pad


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the tokenizer's padding token, or a special token that no conversation ends with; None if there is none."""
    special: list[Any] = [
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        tokenizer.unk_token_id,
    ]
    pad, end, begin, unknown = special
    if pad is not None and pad != end:
        return pad
    used = {end, begin}
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        used.update(render_prompt(tokenizer, chat))
    candidates = [unknown, *tokenizer.all_special_ids]
    return next((token for token in candidates if token is not None and token not in used), None)


def require_fitting(learner: PolicyLearner | RewardModelLearner, dataset: PreferenceDataset, key: str) -> None:
    """Check that the data fit the loss.

    Raises:
        DataError: the loss needs pairs, but rows have labels; or all labels are the same.
    """
    if learner.needs_pairs and not dataset.paired:
        raise DataError(
            f"the rows of {key} are labelled single responses, but the loss compares pairs",
            fix="set loss.name=kto, or use data with columns chosen and rejected",
            where=key,
        )
    good, bad = dataset.labels()
    if not good or not bad:
        raise DataError(
            f"all {good + bad} labels of {key} are {'true' if good else 'false'}",
            why="a preference needs both good and bad responses",
            fix="add responses with the other label",
            where=key,
        )
