"""Scorer of reasoning-gym datasets by each dataset's verifier."""

from __future__ import annotations

import functools
import json
from typing import Any

from hone.data.answers import final_answer
from hone.rewards.scorers.base import graded, register_scorer

PREFIX = "reasoning_gym/"


def _import() -> None:
    import reasoning_gym  # noqa: F401 - slow, so done before time is measured


@register_scorer("reasoning_gym", f"{PREFIX}*", may_hang=True, package=("reasoning_gym", "tasks"), prepare=_import)
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score by the dataset's ``score_answer``, usually 0 to 1.

    Args:
        data_source: ``reasoning_gym/<dataset>``.
        solution_str: the response; the answer is in ``<answer>...</answer>``, after ``####``, or the whole response.
        ground_truth: the dataset's entry, as JSON text or as a dict.
        extra_info: not used.

    Returns:
        ``score``; ``acc`` (1 for a full score); ``format`` (1 if the answer is marked); ``pred``.
    """
    entry = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    answer, marked = final_answer(solution_str)
    score = float(_dataset(data_source.removeprefix(PREFIX)).score_answer(answer, entry))
    return graded(score, right=score >= 1.0, marked=marked, pred=answer)


@functools.cache
def _dataset(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0)
