"""Reward of the example: the share of the pages that an episode has looked up before it says that it is done."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """Return the share of the pages that were read, 0 without an answer; ``acc`` is 1 for the whole book."""
    facts = extra_info["tools_kwargs"]["lookup"]["create_kwargs"]["facts"]
    wanted = {str(page) for page, _ in (facts.items() if isinstance(facts, dict) else facts)}
    calls = extra_info.get("episode", {}).get("tool_calls", [])
    read = {str((call["arguments"] or {}).get("key")).strip() for call in calls} & wanted
    answered = solution_str.rpartition("####")[2].strip() == ground_truth
    share = len(read) / len(wanted) if answered else 0.0
    return {"score": share, "acc": float(share == 1.0)}
