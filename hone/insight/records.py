"""Format of one sample in ``rollouts/`` and ``validation/``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.data.types import Trajectory


def trajectory_record(
    trajectory: Trajectory,
    *,
    score: float | None,
    terms: Mapping[str, float] | None = None,
    extra: Mapping[str, Any] | None = None,
    error: str | None = None,
    prompt_text: str | None = None,
) -> dict[str, Any]:
    """Return one sample for ``rollouts/`` or ``validation/``: tokens, text, mask and scores.

    Args:
        trajectory: the episode.
        score: its reward, None without a verdict.
        terms: named parts of the reward.
        extra: other values that the scorer returned.
        error: why there is no verdict, or None.
        prompt_text: the decoded prompt.
    """
    return {
        "uid": trajectory.uid,
        "index": trajectory.index,
        "data_source": trajectory.sample.data_source,
        "prompt": prompt_text,
        "messages": trajectory.sample.messages,
        "text": trajectory.text,
        "ground_truth": trajectory.sample.ground_truth,
        "score": score,
        "terms": dict(terms or {}),
        "extra": dict(extra or {}),
        "error": error,
        "stop_reason": trajectory.stop_reason.value,
        "episode": None if trajectory.episode is None else trajectory.episode.summary(),
        "part": trajectory.part,
        "prompt_ids": trajectory.prompt_ids,
        "response_ids": trajectory.response_ids,
        "response_mask": trajectory.response_mask,
        "rollout_log_probs": trajectory.rollout_log_probs,
        "weight_versions": list(trajectory.weight_versions),
        "seconds": trajectory.seconds,
    }


def shown_score(record: Mapping[str, Any]) -> str:
    """Return the score of a record for display."""
    return "no verdict" if record["score"] is None else f"score {record['score']:g}"
