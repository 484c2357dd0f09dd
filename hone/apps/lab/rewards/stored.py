"""Episodes that a run has stored in ``rollouts/``, as trajectories that a reward can score again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.data.episode_log import CallRecord, CallStatus, EpisodeEnd, EpisodeLog
from hone.data.scored_rows import samples_by_uid
from hone.data.types import Sample, StopReason, Trajectory, row_of
from hone.errors import DataError
from hone.insight.archive.images import images_of
from hone.insight.archive.read import require_archive

log = logging.getLogger(__name__)


def stored_episodes(
    folder: Path, files: Sequence[str], reward_fn_key: str
) -> Iterator[tuple[int, dict[str, Any], Trajectory]]:
    """Yield step, record and trajectory of every stored segment, in order.

    The dataset ``files`` have the rows' ``extra_info``, which ``rollouts/`` does not hold. Without them it is empty, with a warning.
    """
    archive = require_archive(folder)
    try:
        rows = samples_by_uid(files, reward_fn_key=reward_fn_key)
    except DataError as error:
        log.warning("the rows' extra_info is missing, because the dataset cannot be read: %s", error.what)
        rows = {}
    for step in archive.steps():
        for record in archive.records(step, _COLUMNS):
            yield step, record, stored_trajectory(record, rows)


IDS = ("prompt_ids", "response_ids")
_COLUMNS = (
    "step", "uid", "index", "part", "data_source", "prompt", "messages", "text", "ground_truth", "stop_reason",
    "seconds", "score", "unshaped", "terms", "extra", "error", "episode",
    "prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "sampling_log_probs",
)  # fmt: skip


def stored_trajectory(record: Mapping[str, Any], rows: Mapping[str, Sample], archive: Path | None = None) -> Trajectory:
    """Return the trajectory of a record of the archive; without the ``archive``'s folder images are left out.

    ``rows`` are the dataset's by uid, for their ``extra_info``.
    """
    prompt, response = (() if archive is None else images_of(archive, record[name] or []) for name in IDS)
    row = rows.get(row_of(record["uid"]))
    sample = Sample(
        record["uid"],
        record["prompt_ids"] or [],
        record["messages"],
        record["data_source"] or "",
        record["ground_truth"],
        {} if row is None else row.extra_info,
        None if row is None else row.agent_name,
        images=prompt,
    )
    return Trajectory(
        record["uid"],
        record["index"],
        record["prompt_ids"] or [],
        record["response_ids"] or [],
        record["response_mask"] or [],
        record["rollout_log_probs"] or [],
        record["sampling_log_probs"] or record["rollout_log_probs"] or [],
        record["text"],
        StopReason(record["stop_reason"] or StopReason.STOP),
        sample,
        seconds=record["seconds"] or 0.0,
        episode=record["episode"] and _episode(record["episode"]),
        part=record["part"],
        images=prompt + response,
    )


def _episode(record: Mapping[str, Any]) -> EpisodeLog:
    """Return the log of :meth:`EpisodeLog.record`."""
    calls = [CallRecord(**{**call, "status": CallStatus(call["status"])}) for call in record["tool_calls"]]
    names = (
        "messages",
        "assistant_turns",
        "user_turns",
        "turn_rewards",
        "reward",
        "facts",
        "error",
        "tokenization",
        "retries",
        "generate_seconds",
        "tool_seconds",
    )
    known = {name: record[name] for name in names}
    return EpisodeLog(
        end=EpisodeEnd(record["end"]), calls=calls, conversations=record.get("conversations", []), **known
    )
