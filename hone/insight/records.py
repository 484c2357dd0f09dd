"""Records of samples, as in the rollout archive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Required, TypedDict, Unpack

from hone.data.types import Trajectory, row_of


class ScoreValues(TypedDict, total=False):
    """Values of a record that come from the score; absent ones are null, or empty.

    Attributes:
        score: reward, None without a verdict.
        unshaped: reward before the length penalty, None without one.
        terms: named parts of the reward.
        extra: other values that the scorer returned.
        error: why there is no verdict, or None.
        cause: kind of the error.
    """

    score: Required[float | None]
    unshaped: float | None
    terms: Mapping[str, float] | None
    extra: Mapping[str, Any] | None
    error: str | None
    cause: str | None


def trajectory_record(
    trajectory: Trajectory, *, prompt_text: str | None = None, **values: Unpack[ScoreValues]
) -> dict[str, Any]:
    """Return one sample as in the rollout archive: tokens, text, mask and scores.

    Args:
        trajectory: the episode.
        prompt_text: the decoded prompt.
        values: see :class:`ScoreValues`.
    """
    whole = trajectory.rollout_log_probs == trajectory.sampling_log_probs
    return episode_record(trajectory, prompt_text=prompt_text, **values) | {
        "prompt_ids": list(trajectory.prompt_ids),
        "response_ids": list(trajectory.response_ids),
        "response_mask": list(trajectory.response_mask),
        "token_versions": list(trajectory.token_versions) or None,
        "rollout_log_probs": list(trajectory.rollout_log_probs),
        "sampling_log_probs": None if whole else list(trajectory.sampling_log_probs),
    }


def episode_record(
    trajectory: Trajectory, *, prompt_text: str | None = None, **values: Unpack[ScoreValues]
) -> dict[str, Any]:
    """Return the part of :func:`trajectory_record` without a value per token."""
    place = row_of(trajectory.uid).rpartition(":")[2]
    return {
        "uid": trajectory.uid,
        "index": trajectory.index,
        "part": trajectory.part,
        "data_source": trajectory.sample.data_source,
        "row": int(place) if place.isdecimal() else None,
        "seed": trajectory.seed,
        "prompt": prompt_text,
        "messages": trajectory.sample.messages,
        "text": trajectory.text,
        "ground_truth": trajectory.sample.ground_truth,
        "stop_reason": trajectory.stop_reason.value,
        "seconds": trajectory.seconds,
        "score": values["score"],
        "unshaped": values.get("unshaped"),
        "terms": dict(values.get("terms") or {}),
        "extra": dict(values.get("extra") or {}),
        "error": values.get("error"),
        "cause": values.get("cause"),
        "episode": None if trajectory.episode is None else trajectory.episode.record(),
    }


def weight_versions(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return the lowest and the highest weight version that sampled a token; (0, 0) if unknown."""
    sampled = [version for version in record["token_versions"] or () if version >= 0]
    return (min(sampled), max(sampled)) if sampled else (0, 0)


def shown_score(record: Mapping[str, Any]) -> str:
    """Return the score of a record for display."""
    return "no verdict" if record["score"] is None else f"score {record['score']:g}"
