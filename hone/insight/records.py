"""Records of samples, as in the rollout archive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.data.types import Trajectory, row_of


def trajectory_record(
    trajectory: Trajectory,
    *,
    score: float | None,
    unshaped: float | None = None,
    terms: Mapping[str, float] | None = None,
    extra: Mapping[str, Any] | None = None,
    error: str | None = None,
    cause: str | None = None,
    prompt_text: str | None = None,
) -> dict[str, Any]:
    """Return one sample as in the rollout archive: tokens, text, mask and scores.

    Args:
        trajectory: the episode.
        score: its reward, None without a verdict.
        unshaped: reward before the length penalty, None without one.
        terms: named parts of the reward.
        extra: other values that the scorer returned.
        error: why there is no verdict, or None.
        cause: kind of the error.
        prompt_text: the decoded prompt.
    """
    whole = trajectory.rollout_log_probs == trajectory.sampling_log_probs
    scored = {"score": score, "unshaped": unshaped, "terms": terms, "extra": extra, "error": error, "cause": cause}
    return episode_record(trajectory, prompt_text=prompt_text, **scored) | {
        "prompt_ids": list(trajectory.prompt_ids),
        "response_ids": list(trajectory.response_ids),
        "response_mask": list(trajectory.response_mask),
        "token_versions": list(trajectory.token_versions) or None,
        "rollout_log_probs": list(trajectory.rollout_log_probs),
        "sampling_log_probs": None if whole else list(trajectory.sampling_log_probs),
    }


def episode_record(
    trajectory: Trajectory,
    *,
    score: float | None,
    unshaped: float | None = None,
    terms: Mapping[str, float] | None = None,
    extra: Mapping[str, Any] | None = None,
    error: str | None = None,
    cause: str | None = None,
    prompt_text: str | None = None,
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
        "score": score,
        "unshaped": unshaped,
        "terms": dict(terms or {}),
        "extra": dict(extra or {}),
        "error": error,
        "cause": cause,
        "episode": None if trajectory.episode is None else trajectory.episode.record(),
    }


def weight_versions(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return the lowest and the highest weight version that sampled a token; (0, 0) if unknown."""
    sampled = [version for version in record["token_versions"] or () if version >= 0]
    return (min(sampled), max(sampled)) if sampled else (0, 0)


def shown_score(record: Mapping[str, Any]) -> str:
    """Return the score of a record for display."""
    return "no verdict" if record["score"] is None else f"score {record['score']:g}"
