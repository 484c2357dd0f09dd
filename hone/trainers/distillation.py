"""Advantages that mix teachers with the reward."""

from __future__ import annotations

from hone.algorithms import distillation_advantages
from hone.config.distillation import DistillationConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.insight.metrics import MetricStore
from hone.models.teacher import SPANS
from hone.training.objectives import token_loss_options


def mixed_advantages(advantages: Ragged, batch: Batch, settings: DistillationConfig, metrics: MetricStore) -> Ragged:
    """Return ``task_weight`` times the reward's advantages plus ``coef`` times those of the teacher.

    Args:
        advantages: of the reward.
        batch: with ``old_log_probs`` and ``teacher_log_probs``.
        settings: block ``distillation``.
        metrics: receives the mean distance of a token.
    """
    mask = batch.ragged("response_mask")
    teacher = distillation_advantages(
        batch.ragged("old_log_probs").to_padded(),
        batch.ragged("teacher_log_probs").to_padded(),
        mask.to_padded(),
        loss_mode=settings.loss_mode,
        **token_loss_options(settings),
        **({"spans": batch.ragged(SPANS).to_padded(-1)} if SPANS in batch else {}),
    )
    distance = -Ragged.from_padded(teacher, mask.lengths).values
    metrics.add("distillation/loss", distance[mask.values.bool()].mean())
    return advantages.with_values(settings.task_weight * advantages.values - settings.coef * distance)
