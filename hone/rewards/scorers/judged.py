"""Responses judged by a language model (the block ``reward.judge``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hone.rewards.rubric import question_of
from hone.rewards.scorers.base import register_scorer

if TYPE_CHECKING:
    from hone.rewards.services import Services


def _check(services: Services) -> None:
    assert services.judge  # made here, it says what is missing


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
    """What the judge gives, over the greatest score of the rubric, in [0, 1].

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: shown to the judge as the reference answer.
        extra_info: its ``question`` is shown where there are no messages.
        services: the judge is among them.
        messages: of the prompt; what the user says is the question.

    Returns:
        ``score``; ``judge_prompt_tokens`` and ``judge_completion_tokens`` (its cost, 0 for what was remembered);
        ``judge_cached``; ``judgement`` (the end of what it said).

    Raises:
        JudgementError: the endpoint gives no answer, or the answer holds no score: an error, not a reward of 0.
    """
    judgement = await services.judge.judge(question_of(messages, extra_info), solution_str, ground_truth)
    return {
        "score": judgement.score,
        "judge_prompt_tokens": float(judgement.prompt_tokens),
        "judge_completion_tokens": float(judgement.completion_tokens),
        "judge_cached": float(judgement.cached),
        "judgement": judgement.text[-500:],
    }
