"""Verdicts of a batch: which rows are trained on, and which groups have too few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from hone.cluster.any_batch import AnyBatch, concat_batches, rows_of
from hone.cluster.handles import Work
from hone.data.batch import Batch
from hone.rewards.score import Score as RowScore
from hone.trainers.rollouter import Rollouter, Score
from hone.trainers.stages import StepState


def scored(scores: Sequence[RowScore]) -> Batch:
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


async def too_few_in(work: Work, batch: AnyBatch) -> list[str]:
    """Return the groups of a scored batch with too few verdicts."""
    return (await work.verdicts(batch.select("uid", "part", "verdict")))[2]


async def keep_verdicts(state: StepState, score: Score, rollouter: Rollouter, work: Work) -> None:
    """Score a batch that is not scored yet, and move its rows without a verdict to those that are left out.

    In synchronous training, groups with too few verdicts are replaced here by those of other prompts, until there are none. In
    asynchronous training they have been replaced as they finished.
    """
    if "score" not in state.batch:
        state.batch = await score(state.batch)
        while replaced := await rollouter.replace(state.batch, state.step):
            dropped, groups = replaced
            rows = rows_of(state.batch.uids)
            state.left_out.append(state.batch.reorder([row for uid in dropped for row in rows[uid]]))
            kept = [row for uid in rows if uid not in dropped for row in rows[uid]]
            state.groups = [group for group in state.groups if group.uid not in dropped] + groups
            played = concat_batches([group.batch for group in groups])
            await work.check_sampled(played)
            scored = await score(played)
            state.batch = concat_batches([state.batch.reorder(kept), scored]) if kept else scored
        state.metrics.add("training/no_verdict_groups", rollouter.dropped)
    with_verdict, without, _ = await work.verdicts(state.batch.select("uid", "part", "verdict"))
    if without:
        state.left_out.append(state.batch.reorder(without))
        state.batch = state.batch.reorder(with_verdict)
