"""Training rows of the updates: without tokens that rollout correction rejected, and resampled for PF-PPO.

Advantages and reports use the complete batch; only the updates use this view.
"""

from __future__ import annotations

import torch

from hone.algorithms import rollout_correction
from hone.algorithms.resampling import resample
from hone.config.algorithm import AlgorithmConfig
from hone.config.derived import correction_settings
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.seeding import derive_seed
from hone.errors import ConfigError
from hone.insight.metrics import MetricStore

KEPT = "kept_mask"
"""Column with 1 on tokens that the correction keeps in the loss."""


def correct(batch: Batch, algorithm: AlgorithmConfig, metrics: MetricStore) -> Batch:
    """Measure the gap between engine and trainer, and add the columns of the correction.

    The columns are ``kept_mask`` and, with ``rollout_is``, ``rollout_is_weights``. The response mask stays unchanged, since rewards
    and groups are of complete responses.

    Raises:
        ConfigError: all tokens are rejected.
    """
    settings = correction_settings(algorithm.rollout_correction)
    del settings["bypass_mode"], settings["loss_type"]
    mask = batch.ragged("response_mask")
    correction = rollout_correction(
        batch.ragged("old_log_probs").to_padded(),
        batch.ragged("rollout_log_probs").to_padded(),
        mask.to_padded(),
        **settings,
    )
    metrics.update(correction.metrics)
    if not correction.response_mask.any():
        raise ConfigError(
            f"rollout correction rejected all {int(mask.values.sum())} tokens of the batch",
            why="engine and trainer disagree on every response (see rollout_corr/* and training/rollout_probs_diff_*), or "
            "the bounds are too narrow; no token is left to train on",
            fix=f"use wider bounds than rollout_rs_threshold={settings['rollout_rs_threshold']}, or "
            "algorithm.rollout_correction.rollout_rs=null",
            where="algorithm.rollout_correction",
        )
    columns = {KEPT: Ragged.from_padded(correction.response_mask, mask.lengths)}
    if correction.weights is not None:
        columns["rollout_is_weights"] = Ragged.from_padded(correction.weights, mask.lengths)
    return batch.with_columns(**columns)


def update_view(batch: Batch, algorithm: AlgorithmConfig, *, n: int, seed: int, step: int) -> Batch:
    """Return the rows that the updates of this step learn from.

    Args:
        batch: :func:`~hone.trainers.algorithm.learnt_tokens` of the batch, with all columns.
        algorithm: config block ``algorithm``.
        seed: run seed; with the step it determines PF-PPO's sample.
    """
    if not algorithm.use_pf_ppo:
        return batch
    drawn = resample(
        batch.tensor("reward"),
        algorithm.pf_ppo.reweight_method,
        weight_pow=algorithm.pf_ppo.weight_pow,
        generator=torch.Generator().manual_seed(derive_seed(seed, "pf-ppo", step)),
    )
    # mini-batches are split by prompts: n drawn rows count as one prompt, so that every mini-batch keeps its size
    return batch.reorder(drawn).with_columns(uid=[str(index // n) for index in range(len(drawn))])
