"""Scorer that uses a language model as judge (config block ``reward.judge``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hone.rewards.rubric import question_of
from hone.rewards.scorers.base import register_scorer

if TYPE_CHECKING:
    from hone.rewards.services import Services


def _check(services: Services) -> None:
    assert services.judge  # creating it reports missing settings


@register_scorer("llm_judge", "llm_judge", "judge", check=_check)
async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    *,
    services: Services,
    messages: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Score by the judge's score divided by the rubric's maximum, in [0, 1].

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: shown to the judge as the reference answer.
        extra_info: its ``question`` is used without messages.
        services: provides the judge.
        messages: messages of the prompt; the user's text is the question.

    Returns:
        ``score``; ``judge_prompt_tokens`` and ``judge_completion_tokens`` (its cost, 0 for a cached judgement);
        ``judge_cached``; ``judgement`` (the end of its answer).

    Raises:
        JudgementError: the endpoint gives no answer, or the answer has no score, which is an error and not a reward of 0.
    """
    judgement = await services.judge.judge(question_of(messages, extra_info), solution_str, ground_truth)
    return {
        "score": judgement.score,
        "judge_prompt_tokens": float(judgement.prompt_tokens),
        "judge_completion_tokens": float(judgement.completion_tokens),
        "judge_cached": float(judgement.cached),
        "judgement": judgement.text[-500:],
    }
