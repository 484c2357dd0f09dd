"""Verdicts of a batch: which rows are trained on, and which groups have too few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from hone.cluster.any_batch import AnyBatch
from hone.cluster.runtime import Group
from hone.data.batch import Batch
from hone.rewards.score import Score
from hone.trainers.episodes import concat_batches
from hone.trainers.rollouter import rows_by_uid


def scored(scores: Sequence[Score]) -> Batch:
    """Return the columns ``score`` and ``verdict`` (1 or 0) of every row."""
    verdicts = torch.tensor([score.error is None for score in scores], dtype=torch.int64)
    return Batch({"score": list(scores), "verdict": verdicts})


def sort_rows(batch: Batch, fewest: int) -> tuple[list[int], list[int], list[str]]:
    """Sort the rows of a scored batch by their verdicts.

    A response without a verdict is as if it had never been sampled: baselines, group statistics and pass rates are those of the others.
    Whether a verdict is missing must not depend on the response; then every estimate keeps its expectation.

    Args:
        batch: with the columns ``uid``, ``part`` and ``verdict``.
        fewest: smallest number of verdicts with which a group is trained on.

    Returns:
        Rows with a verdict and rows without, and the uids of groups with too few verdicts, all in order.
    """
    verdicts = batch.tensor("verdict").tolist()
    counts = Counter(dict.fromkeys(batch.uids, 0))
    for uid, part, verdict in zip(batch.uids, batch.tensor("part").tolist(), verdicts, strict=True):
        counts[uid] += verdict and part == 0
    small = [uid for uid, count in counts.items() if count < fewest]
    rows = range(len(batch))
    return [row for row in rows if verdicts[row]], [row for row in rows if not verdicts[row]], small


async def too_few_in(batch_ops: Group, batch: AnyBatch) -> list[str]:
    """Return the groups of a scored batch with too few verdicts."""
    return (await batch_ops.verdicts(batch.select("uid", "part", "verdict")))[2]


async def with_verdicts(trainer: Any, batch: AnyBatch) -> tuple[AnyBatch, list[AnyBatch]]:
    """Return the rows of a batch that have a verdict, and batches of those that have none.

    By turns, groups with too few verdicts are replaced by those of other prompts, until there are none; other groups have been replaced
    as they finished. ``trainer`` is the :class:`~hone.trainers.rl.RLTrainer` that trains on the batch.
    """
    left_out: list[AnyBatch] = []
    if "score" not in batch:
        batch = await trainer.scored(batch)
        while replaced := await trainer.rollouter.replace(batch, trainer.step):
            dropped, groups = replaced
            rows = rows_by_uid(batch.uids)
            left_out.append(batch.reorder([row for uid in dropped for row in rows[uid]]))
            kept = [row for uid in rows if uid not in dropped for row in rows[uid]]
            trainer.groups = [group for group in trainer.groups if group.uid not in dropped] + groups
            played = concat_batches([group.batch for group in groups])
            await trainer.batch_ops.check_sampled(played)
            scored = await trainer.scored(played)
            batch = concat_batches([batch.reorder(kept), scored]) if kept else scored
        trainer.metrics.add("training/no_verdict_groups", trainer.rollouter.dropped)
    with_verdict, without, _ = await trainer.batch_ops.verdicts(batch.select("uid", "part", "verdict"))
    if without:
        left_out.append(batch.reorder(without))
        batch = batch.reorder(with_verdict)
    return batch, left_out
