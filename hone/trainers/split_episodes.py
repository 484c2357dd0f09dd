"""Episodes that left several parts, put together for what looks at whole episodes, and taken apart again.

Where a chat template rewrites history, an episode leaves a row a part. What estimators compare and add up are episodes: a group's
mean counts each once, and a reward at the end reaches the turns of earlier parts. So they are given one row an episode, its
parts behind one another, and what they say of each token goes back to the token's own row.
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
"""Places between two parts, which the policy did not sample: without them two turns would become one."""


def is_split(batch: Batch) -> bool:
    """Whether an episode of the batch left several parts."""
    return "part" in batch and bool((batch.tensor("part") > 0).any())


def joined(batch: Batch, columns: Collection[str]) -> Batch:
    """One row an episode, with these columns: of tokens, the parts behind one another; of anything else, what the first part has."""
    rows = episode_rows(batch)
    first = batch.select(*(name for name in columns if name in batch)).reorder([own[0] for own in rows])
    made: dict[str, Column] = {}
    for name in first.names():
        column = batch[name]
        if isinstance(column, Ragged):
            made[name] = Ragged.from_rows([_behind_one_another(column, own) for own in rows], column.values.dtype)
        elif name == "trajectory":
            parts = batch.objects("trajectory")
            made[name] = [_one([parts[row] for row in own]) for own in rows]
    return first.with_columns(**made)


def apart(column: Ragged, batch: Batch) -> Ragged:
    """Give each row of the batch its part of a column of :func:`joined`."""
    lengths = batch.ragged("response_mask").lengths
    found: list[torch.Tensor] = [torch.empty(0)] * len(batch)
    for episode, own in enumerate(episode_rows(batch)):
        values, start = column.row(episode), 0
        for row in own:
            found[row] = values[start : start + int(lengths[row])]
            start += int(lengths[row]) + GAP
    return Ragged.from_rows(found, column.values.dtype)


def _behind_one_another(column: Ragged, rows: Sequence[int]) -> torch.Tensor:
    gap = column.values.new_zeros(GAP)
    pieces = [piece for row in rows for piece in (gap, column.row(row))]
    return torch.cat(pieces[1:])


def _one(parts: Sequence[Trajectory]) -> Trajectory:
    """A trajectory whose turns are those of all parts, each behind what it was sampled behind: a part's prompt stands before it."""
    if len(parts) == 1:
        return parts[0]
    ids, mask = list(parts[0].response_ids), list(parts[0].response_mask)
    for part in parts[1:]:
        ids += [*part.prompt_ids, *part.response_ids]
        mask += [0] * len(part.prompt_ids) + part.response_mask
    return dataclasses.replace(parts[0], response_ids=ids, response_mask=mask)
