"""Convert episodes to a batch with the columns that a training step begins with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hone.data.batch import Batch
from hone.data.images import images_column
from hone.data.ragged import Ragged
from hone.data.types import Trajectory


def to_batch(trajectories: Sequence[Trajectory], *, reads_images: bool = False) -> Batch:
    """Build a batch with one row per trajectory.

    With ``reads_images`` it has a column ``images`` even if no row has one: batches of one run have the same columns.

    Columns: ragged ``prompt_ids``, ``response_ids``, ``response_mask``, ``rollout_log_probs``, ``token_versions``, ``support_sizes``
    (the last four aligned with ``response_ids``), ``support_ids``, ``expert_ids``; tensor ``part`` (0 for the first trajectory of an episode);
    objects ``uid``, ``index``, ``data_source``, ``trajectory``, and ``images`` if a row has some. The log-prob of a token that was sampled from a support is that of
    the distribution sampled from; all others are of the whole policy.
    """
    sizes = [t.support_sizes or [0] * len(t.response_ids) for t in trajectories]
    log_probs = [_trained_log_probs(t, row) for t, row in zip(trajectories, sizes, strict=True)]
    ids = Ragged.from_rows([t.response_ids for t in trajectories], torch.int64)
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([t.prompt_ids for t in trajectories], torch.int64),
            "response_ids": ids,
            "response_mask": Ragged.from_rows([t.response_mask for t in trajectories], torch.int64),
            "rollout_log_probs": Ragged.from_rows(log_probs, torch.float32),
            "token_versions": Ragged.from_rows(
                [t.token_versions or [0] * len(t.response_ids) for t in trajectories], torch.int64
            ),
            "support_sizes": Ragged.from_rows(sizes, torch.int32),
            "support_ids": Ragged.from_rows([t.support_ids for t in trajectories], torch.int32),
            "expert_ids": Ragged.from_rows(
                [torch.as_tensor(np.array(t.expert_ids, dtype=np.int16)) for t in trajectories]
            ),
            "part": torch.tensor([t.part for t in trajectories], dtype=torch.int64),
            "uid": [t.uid for t in trajectories],
            "index": [t.index for t in trajectories],
            "data_source": [t.sample.data_source for t in trajectories],
            "trajectory": list(trajectories),
            **images_column([t.images for t in trajectories], always=reads_images),
        }
    )


def _trained_log_probs(trajectory: Trajectory, sizes: Sequence[int]) -> Sequence[float]:
    """Return the engine's log-prob of each token under the distribution whose log-probs are trained."""
    if not trajectory.support_ids:
        return trajectory.rollout_log_probs
    pairs = zip(sizes, trajectory.sampling_log_probs, trajectory.rollout_log_probs, strict=True)
    return [restricted if size else whole for size, restricted, whole in pairs]


def is_broken(trajectory: Trajectory) -> bool:
    return trajectory.episode is not None and trajectory.episode.error is not None


def episode_rows(batch: Batch) -> list[list[int]]:
    """Return the rows of each episode, in segment order; episodes in the order of their first row."""
    rows: dict[tuple[str, int], list[int]] = {}
    for row, name in enumerate(zip(batch.objects("uid"), batch.objects("index"), strict=True)):
        rows.setdefault(name, []).append(row)
    part = batch.tensor("part").tolist()
    return [sorted(members, key=part.__getitem__) for members in rows.values()]
