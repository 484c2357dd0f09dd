"""The batch as the updates see it: without the tokens that rollout correction rejected, and drawn anew for PF-PPO.

Advantages and what a step reports are of the whole batch; only the updates learn from this view of it.
"""

from __future__ import annotations

from typing import Any

import torch

from hone.algorithms import rollout_correction
from hone.algorithms.resampling import resample
from hone.config.algorithm import AlgorithmConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.seeding import derive_seed
from hone.errors import ConfigError
from hone.insight.metrics import MetricStore
from hone.training.correction import correction_settings

KEPT = "kept_mask"
"""Column of the tokens that the correction leaves in the loss."""


def correct(batch: Batch, algorithm: AlgorithmConfig, metrics: MetricStore) -> Batch:
    """Measure the gap between engine and trainer, and add what the correction makes of it.

    Adds ``kept_mask`` and, with ``rollout_is``, ``rollout_is_weights``. The response mask stays: rewards and groups are
    those of the whole responses.

    Raises:
        ConfigError: nothing is left to learn from.
    """
    settings = correction_settings(algorithm.rollout_correction)
    del settings["bypass_mode"], settings["loss_type"]
    mask = batch.ragged("response_mask")
    found = rollout_correction(
        batch.ragged("old_log_probs").to_padded(),
        batch.ragged("rollout_log_probs").to_padded(),
        mask.to_padded(),
        **settings,
    )
    metrics.update(found.metrics)
    if not found.response_mask.any():
        raise ConfigError(
            f"rollout correction rejected all {int(mask.values.sum())} tokens of the batch",
            why="engine and trainer disagree on every response (see rollout_corr/* and training/rollout_probs_diff_*), or "
            "the bounds admit nothing; there is nothing to learn from",
            fix=f"wider bounds than rollout_rs_threshold={settings['rollout_rs_threshold']}, or "
            "algorithm.rollout_correction.rollout_rs=null",
            where="algorithm.rollout_correction",
        )
    columns = {KEPT: Ragged.from_padded(found.response_mask, mask.lengths)}
    if found.weights is not None:
        columns["rollout_is_weights"] = Ragged.from_padded(found.weights, mask.lengths)
    return batch.with_columns(**columns)


def learnt_tokens(batch: Any) -> Any:
    """The batch (of either runtime) with those tokens in the loss that the correction has kept."""
    return batch.updated(batch.select(KEPT).rename({KEPT: "response_mask"})) if KEPT in batch else batch


def update_view(batch: Batch, algorithm: AlgorithmConfig, *, n: int, seed: int, step: int) -> Batch:
    """Return the rows and tokens that the updates of this step learn from.

    Args:
        batch: with every column.
        algorithm: the block ``algorithm``.
        n: responses a prompt.
        seed: run seed; with the step it decides what PF-PPO draws.
        step: number of the step.
    """
    batch = learnt_tokens(batch)
    if not algorithm.use_pf_ppo:
        return batch
    drawn = resample(
        batch.tensor("reward"),
        algorithm.pf_ppo.reweight_method,
        weight_pow=algorithm.pf_ppo.weight_pow,
        generator=torch.Generator().manual_seed(derive_seed(seed, "pf-ppo", step)),
    )
    # a mini-batch is cut by prompts: rows drawn together stand for one, so that every mini-batch keeps its size
    return batch.reorder(drawn).with_columns(uid=[str(place // n) for place in range(len(drawn))])
