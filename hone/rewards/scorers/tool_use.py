"""Scorers of tool use in an episode: well-formed calls, and few calls."""

from __future__ import annotations

from typing import Any

from hone.rewards.scorers.base import register_scorer

_WELL_FORMED = ("ok", "timeout", "error", "over_limit")
"""Statuses of calls that were parsed, name a known tool and fit its schema, with any result."""


@register_scorer("tool_format", "tool_format", whole_text=True)
def tool_format_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    required: bool = True,
) -> dict[str, Any]:
    """Score the share of tool calls that can be parsed, name a known tool and fit its schema.

    Without any call the score is 0 if calls are ``required``, else 1.

    Args:
        data_source: not used.
        solution_str: not used; the scorer reads the status of the calls.
        ground_truth: not used.
        extra_info: extra info of an episode, with ``episode.tool_calls``.
        required: True if a response must call tools.
    """
    calls = _calls(extra_info)
    good = [call for call in calls if call["status"] in _WELL_FORMED]
    score = len(good) / len(calls) if calls else float(not required)
    succeeded = sum(call["status"] == "ok" for call in calls) / len(calls) if calls else 0.0
    return {"score": score, "tool_calls": float(len(calls)), "tool_success": succeeded}


@register_scorer("tool_efficiency", "tool_efficiency", whole_text=True)
def tool_efficiency_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    free_calls: int = 1,
    cost: float = 0.1,
) -> dict[str, Any]:
    """Score ``-cost`` for each call beyond ``free_calls``, and for each that repeats an earlier one; at least -1."""
    calls = _calls(extra_info)
    seen = [(call["name"], repr(call["arguments"])) for call in calls]
    repeated = len(seen) - len(set(seen))
    wasted = max(0, len(calls) - free_calls) + repeated
    return {"score": max(-1.0, -cost * wasted) if wasted else 0.0, "repeated_calls": float(repeated)}


def _calls(extra_info: dict[str, Any] | None) -> list[dict[str, Any]]:
    return (extra_info or {}).get("episode", {}).get("tool_calls", [])
