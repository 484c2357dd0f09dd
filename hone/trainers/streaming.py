"""Streaming of a batch into its update: groups are trained on as they finish, while the same weights generate the others.

The gradients of the parts add up to those of the batch by turns, up to rounding, and are applied in one update. ``trainer`` is the
:class:`~hone.trainers.rl.RLTrainer` whose stages these are.
"""

from __future__ import annotations

import functools
from typing import Any

from hone.cluster.any_batch import AnyBatch
from hone.trainers.distillation import taught
from hone.trainers.episodes import concat_batches
from hone.trainers.stages import SAMPLED, SCORED, Stage

STREAMED_PARTS = 4
"""Parts into which a batch is divided."""


def streamed_stages(trainer: Any) -> list[Stage]:
    """Return the stages of a step whose batch streams into its update."""
    computed = ("advantages", "returns", "old_log_probs")
    return [
        Stage("stream", functools.partial(stream, trainer), adds=(*SAMPLED, *SCORED, *computed)),
        Stage("rollout_corr", trainer.correct, needs=("old_log_probs",)),
        Stage("update_weights", trainer.publish),
    ]


async def stream(trainer: Any, batch: AnyBatch) -> AnyBatch:
    """Compute the gradients of groups as they finish, then apply those of the whole batch in one update."""
    size, parts, trainer.groups = -(-trainer.buffer.groups_per_batch // STREAMED_PARTS), [], []
    async for groups in trainer.rollouter.parts(size):
        trainer.groups += groups
        part = concat_batches([group.batch for group in groups])
        await trainer.batch_ops.check_sampled(part)
        part = await trainer.score(part)
        if trainer.reference is not None:
            part = await trainer.reference_log_probs(part)
        if trainer.config.distillation.enable:
            part = await taught(trainer, part)
        part = await trainer.advantages(part)
        await trainer.batch_ops.check_ids(part)
        with trainer.metrics.timer("update_actor"):
            outputs = await trainer.actor.accumulate(part, trainer.step - 1, first=not parts)
        part = part.updated(outputs.rename({"log_probs": "old_log_probs"}))
        if trainer.archive.whole(trainer.step):
            part = part.updated(part.select("old_log_probs").rename({"old_log_probs": "new_log_probs"}))
        parts.append(part)
    with trainer.metrics.timer("update_actor"):
        update = await trainer.actor.apply_gradients(trainer.step - 1)
    batch = concat_batches(parts)
    trainer.report_groups()
    await trainer.check_engine(batch)
    await trainer.record("actor", update, batch)
    return batch
