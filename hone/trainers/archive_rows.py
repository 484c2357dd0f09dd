"""Rows of the rollout archive, from the columns of a step's batch.

Columns by token are copied as a whole: values and offsets of a ragged column are those of an arrow list column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hone.data.batch import Batch, same_column
from hone.data.ragged import Ragged
from hone.data.types import Trajectory
from hone.insight.archive.schema import BY_NAME, FLOATS, IDS, INTS
from hone.insight.archive.write import to_table
from hone.insight.records import episode_record
from hone.trainers.archiving import TRAINED
from hone.trainers.reporting import prompt_text, score_values
from hone.trainers.update_view import KEPT

_SOURCES = {
    **{name: name for name in ("prompt_ids", "response_ids", "response_mask", "token_versions", "old_log_probs")},
    **{name: name for name in ("new_log_probs", "ref_log_probs", "entropy", "values", "advantages", "returns")},
    "sum_pi_squared": "sum_pi_squared",
    "token_rewards": "token_level_rewards",
    "correction": "rollout_is_weights",
}
"""Column of the archive to column of the batch."""


def prompt_texts(batch: Batch, decode: Callable[[list[int]], str]) -> dict[str, str]:
    """Return the text of the prompt of each group; prompts that are not messages are decoded."""
    texts: dict[str, str] = {}
    for trajectory in batch.objects("trajectory"):
        if trajectory.uid not in texts:
            text = prompt_text(trajectory)
            texts[trajectory.uid] = decode(list(trajectory.prompt_ids)) if text is None else text
    return texts


def rollout_table(batch: Batch, fates: Sequence[str], step: int, prompts: Mapping[str, str]) -> pa.Table:
    """Return the rows of a batch as a table of the archive.

    Args:
        batch: rows with ``trajectory``; columns that the step did not compute are null.
        fates: fate of each row. The loss mask is of batches whose rows were all trained.
        prompts: see :func:`prompt_texts`.
    """
    trajectories = batch.objects("trajectory")
    scores = batch.objects("score") if "score" in batch else [None] * len(batch)
    records = [
        {
            "step": step,
            "fate": fate,
            **episode_record(trajectory, prompt_text=prompts[trajectory.uid], **score_values(score)),
        }
        for trajectory, score, fate in zip(trajectories, scores, fates, strict=True)
    ]
    for record, extra in zip(records, _by_sequence(batch), strict=True):
        record.update(extra)
    columns = {name: _lists(batch.ragged(source), name) for name, source in _SOURCES.items() if source in batch}
    if all(fate == TRAINED for fate in fates):
        columns["loss_mask"] = _lists(batch.ragged(KEPT if KEPT in batch else "response_mask"), "loss_mask")
    if "token_level_scores" in batch and not same_column(batch["token_level_scores"], batch["token_level_rewards"]):
        columns["token_scores"] = _lists(batch.ragged("token_level_scores"), "token_scores")
    return to_table(records, columns | _engine_log_probs(batch, trajectories))


def _by_sequence(batch: Batch) -> list[dict[str, Any]]:
    """Return the inputs of estimators that have one value per sequence."""
    rows: list[dict[str, Any]] = [{} for _ in range(len(batch))]
    if "reward_baselines" in batch:
        for row, baseline in zip(rows, batch.tensor("reward_baselines").tolist(), strict=True):
            row["baseline"] = baseline
    if "turn_values" in batch:
        for row, values in zip(rows, batch.objects("turn_values"), strict=True):
            row["turn_values"] = values
    return rows


def _engine_log_probs(batch: Batch, trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    """Return the columns of the engine's log-probs; that of the distribution sampled from only where it is another one."""
    if all(trajectory.sampling_log_probs == trajectory.rollout_log_probs for trajectory in trajectories):
        return {"rollout_log_probs": _lists(batch.ragged("rollout_log_probs"), "rollout_log_probs")}
    responses = batch.ragged("response_ids")
    columns = {}
    for name in ("rollout_log_probs", "sampling_log_probs"):
        rows: list[Any] = [np.asarray(getattr(trajectory, name), np.float32) for trajectory in trajectories]
        columns[name] = _lists(responses.with_values(torch.from_numpy(np.concatenate(rows))), name)
    return columns


def _lists(column: Ragged, name: str) -> pa.Array:
    dtype = {IDS: torch.int64, INTS: torch.int32, FLOATS: torch.float32}[BY_NAME[name].kind]
    values = column.values.detach().to("cpu", dtype).contiguous().numpy()
    return pa.ListArray.from_arrays(pa.array(column.offsets.numpy().astype(np.int32)), pa.array(values))
