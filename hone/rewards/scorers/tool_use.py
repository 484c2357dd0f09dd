"""How tools are used in an episode: are the calls well formed, and are they few."""

from __future__ import annotations

from typing import Any

from hone.rewards.scorers.base import register_scorer

_WELL_FORMED = ("ok", "timeout", "error", "over_limit")
"""Calls that could be read, name a tool and fit its schema, whatever came of them."""


@register_scorer("tool_format", "tool_format")
def tool_format_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    required: bool = True,
) -> dict[str, Any]:
    """The share of tool calls that can be read, name a tool that exists and fit its schema.

    Without any call it is 0 where calls are ``required``, else 1.

    Args:
        data_source: not used.
        solution_str: not used: what counts is what became of the calls.
        ground_truth: not used.
        extra_info: of an episode, with ``episode.tool_calls``.
        required: whether a response needs tools.
    """
    calls = _calls(extra_info)
    good = [call for call in calls if call["status"] in _WELL_FORMED]
    score = len(good) / len(calls) if calls else float(not required)
    succeeded = sum(call["status"] == "ok" for call in calls) / len(calls) if calls else 0.0
    return {"score": score, "tool_calls": float(len(calls)), "tool_success": succeeded}


@register_scorer("tool_efficiency", "tool_efficiency")
def tool_efficiency_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    free_calls: int = 1,
    cost: float = 0.1,
) -> dict[str, Any]:
    """``-cost`` for each call beyond ``free_calls``, and for each that repeats an earlier one; at least -1."""
    calls = _calls(extra_info)
    seen = [(call["name"], repr(call["arguments"])) for call in calls]
    repeated = len(seen) - len(set(seen))
    wasted = max(0, len(calls) - free_calls) + repeated
    return {"score": max(-1.0, -cost * wasted) if wasted else 0.0, "repeated_calls": float(repeated)}


def _calls(extra_info: dict[str, Any] | None) -> list[dict[str, Any]]:
    return (extra_info or {}).get("episode", {}).get("tool_calls", [])
