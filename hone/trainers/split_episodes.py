"""Episodes with several segments: joined for computations over episodes, and split again.

If a chat template rewrites history, an episode has one row per segment. Estimators compare and sum episodes: a group's mean counts
each once, and a reward at the end reaches the turns of earlier segments. Therefore they receive one row per episode with its
segments concatenated, and their per-token results go back to each token's row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch

from hone.data.batch import Batch, Column
from hone.data.ragged import Ragged
from hone.data.trajectories import episode_rows
from hone.data.types import Trajectory

GAP = 1
"""Unsampled positions between two segments, without which two turns would merge into one."""


def is_split(batch: Batch) -> bool:
    """Return whether an episode of the batch has several segments."""
    return "part" in batch and bool((batch.tensor("part") > 0).any())


def join_segments(batch: Batch, columns: Collection[str]) -> Batch:
    """Return one row per episode with these columns.

    Token columns are the concatenated segments; other columns are those of the first segment.
    """
    rows = episode_rows(batch)
    first = batch.select(*(name for name in columns if name in batch)).reorder(
        [episode_row_ids[0] for episode_row_ids in rows]
    )
    joined_columns: dict[str, Column] = {}
    for name in first.names():
        column = batch[name]
        if isinstance(column, Ragged):
            joined_columns[name] = Ragged.from_rows(
                [_concatenated(column, segment_rows) for segment_rows in rows], column.values.dtype
            )
        elif name == "trajectory":
            segments = batch.objects("trajectory")
            joined_columns[name] = [
                _joined_trajectory([segments[row] for row in segment_rows]) for segment_rows in rows
            ]
    return first.with_columns(**joined_columns)


def split_column(column: Ragged, batch: Batch) -> Ragged:
    """Split a column of :func:`join_segments` into the rows of the batch."""
    lengths = batch.ragged("response_mask").lengths
    values_by_row: list[torch.Tensor] = [torch.empty(0)] * len(batch)
    for episode, segment_rows in enumerate(episode_rows(batch)):
        values, start = column.row(episode), 0
        for row in segment_rows:
            values_by_row[row] = values[start : start + int(lengths[row])]
            start += int(lengths[row]) + GAP
    return Ragged.from_rows(values_by_row, column.values.dtype)


def _concatenated(column: Ragged, rows: Sequence[int]) -> torch.Tensor:
    gap = column.values.new_zeros(GAP)
    spans = [span for row in rows for span in (gap, column.row(row))]
    return torch.cat(spans[1:])


def _joined_trajectory(segments: Sequence[Trajectory]) -> Trajectory:
    """Join segments into one trajectory; each further segment follows its prompt."""
    if len(segments) == 1:
        return segments[0]
    ids, mask = list(segments[0].response_ids), list(segments[0].response_mask)
    for segment in segments[1:]:
        ids += [*segment.prompt_ids, *segment.response_ids]
        mask += [0] * len(segment.prompt_ids) + segment.response_mask
    return dataclasses.replace(segments[0], response_ids=ids, response_mask=mask)
