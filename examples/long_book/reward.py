"""Reward of the example: the episode has looked up every page of its book, and says that it is done."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """Return 1 if all pages were read before the answer; ``pages`` is the share of pages that were."""
    facts = extra_info["tools_kwargs"]["lookup"]["create_kwargs"]["facts"]
    wanted = {str(page) for page, _ in (facts.items() if isinstance(facts, dict) else facts)}
    calls = extra_info.get("episode", {}).get("tool_calls", [])
    read = {str((call["arguments"] or {}).get("key")).strip() for call in calls} & wanted
    answered = solution_str.rpartition("####")[2].strip() == ground_truth
    whole = float(answered and read == wanted)
    return {"score": whole, "acc": whole, "pages": len(read) / len(wanted)}
