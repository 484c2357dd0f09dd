"""Scorer of mathematics: compare final answers as numbers and words, and formulas by math-verify if installed."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from hone.data.answers import TAIL, boxed, final_answer, same_answer
from hone.rewards.scorers.base import graded, register_scorer


def _installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _import() -> None:
    if _installed():
        # it warns that its time limits are off; the worker's limit is on
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        _verify("1", "1", marked=True)


@register_scorer(
    "math",
    "math", "math_*", "MATH", "aime*", "numina_*", "lighteval/MATH*", "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    may_hang=True,
    prepare=_import,
)  # fmt: skip
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Score 1 if the response's final answer is mathematically equal to the ground truth.

    The answer is in the last ``\boxed{...}``, ``<answer>...</answer>`` or line after ``####``, else after the last "answer is".
    Without any of them the end of the response is searched. Only the last mark counts: listing guesses does not help.

    Returns:
        ``score``; ``acc``; ``format`` (1 if an answer is marked); ``pred``; ``verifier``: "math-verify", or "exact" (formulas are
        equal as normalised text) if that package is not installed.
    """
    answer, marked = final_answer(solution_str, stated=True)
    answer, truth = answer if marked else answer[-TAIL:], boxed(str(ground_truth)) or str(ground_truth)
    correct = same_answer(answer, truth)
    if correct is None:
        correct = _installed() and _verify(answer, truth, marked)
    verifier = "math-verify" if _installed() else "exact"
    return graded(correct, right=correct, marked=marked, pred=answer[:200]) | {"verifier": verifier}


def _verify(answer: str, truth: str, marked: bool) -> bool:
    from math_verify import parse, verify

    def read(text: str) -> list[Any]:
        # the worker's time limit covers parsing and comparing; the package's limit uses signals
        return parse(text, parsing_timeout=0)

    parsed = read(f"\\boxed{{{answer}}}" if marked else answer)
    return bool(parsed) and verify(read(f"\\boxed{{{truth}}}"), parsed, timeout_seconds=0)
