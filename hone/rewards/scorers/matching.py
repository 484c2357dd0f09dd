"""Scorers that compare answers as text: by words, letter of a choice, or number."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hone.rewards.scorers.base import final_answer, register_scorer, tagged_answer

TAIL = 1000
"""Characters at the end of a response that are searched for an answer."""
MAX_TAGS = 10
"""Maximum number of answer tags; a response with more is guessing."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_STATED = re.compile(r"answer(?:\s+is|\s*:)?\W{0,12}([A-Z])\b(?!\w)", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{\W{0,3}(?:\\text\{)?\W{0,3}([A-Za-z])\W{0,4}\}")
_SINGLE_LETTER = re.compile(r"(?:^|[\s(*\[])([A-Z])(?=[\s).:*\]]|$)")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|[-+]?\.\d+")


def squad_normal(text: str) -> str:
    """Normalise text as SQuAD does: lower case, no punctuation or articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


@register_scorer("f1", "f1", "squad*")
def f1_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score the F1 of words with the ground truth, or with the best of several, in [0, 1].

    The answer is in ``<answer>...</answer>``, after ``####``, or the whole response. Words are normalised as in SQuAD.
    """
    answer, marked = final_answer(solution_str)
    best = max(_f1(squad_normal(answer), squad_normal(truth)) for truth in _truths(ground_truth))
    return {"score": best, "acc": float(best == 1.0), "format": float(marked), "pred": answer[:200]}


@register_scorer("search_em", "searchR1_*", "search_em")
def search_em_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    format_score: float = 0.0,
    substring: bool = False,
) -> dict[str, Any]:
    """Score 1 if the last ``<answer>...</answer>`` equals one of the ground truths, normalised as in SQuAD.

    The score is divided by 4 for more than ten answer tags, which are guesses.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: ``{"target": [...]}``, a list, or one text.
        extra_info: not used.
        format_score: reward of a wrong answer in tags.
        substring: True to accept an answer that contains a ground truth.
    """
    answer = tagged_answer(solution_str)
    truths = [squad_normal(truth) for truth in _truths(ground_truth)]
    given = squad_normal(answer or "")
    right = answer is not None and (any(truth in given for truth in truths if truth) if substring else given in truths)
    score = 1.0 if right else format_score if answer is not None else 0.0
    if max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MAX_TAGS:
        score /= 4
    return {"score": score, "acc": float(right), "format": float(answer is not None), "pred": given or None}


@register_scorer("multiple_choice", "multiple_choice", "mmlu*", "arc*", "gpqa*", "commonsense_qa", "cais/mmlu*")
def multiple_choice_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Score 1 for the right letter.

    The letter is in the last ``<answer>`` or ``####``, else in the last ``\boxed{}``, else after the last "answer is". Otherwise it
    is the last single letter near the end, if all single letters there are the same.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the letter, or the number of the choice counted from 0.
        extra_info: not used.
    """
    truth = _letter_of(ground_truth)
    letter = _letter(solution_str)
    return {
        "score": float(letter == truth),
        "acc": float(letter == truth),
        "format": float(letter is not None),
        "pred": letter,
    }


@register_scorer("number", "number", "numeric")
def number_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    tolerance: float = 1e-6,
    partial: float = 0.0,
) -> dict[str, Any]:
    """Score 1 for a number within ``tolerance`` (relative) of the true one, else up to ``partial``.

    The last number of the answer counts (after ``####``, in ``<answer>``, else of the response). Other numbers get ``partial x (1 -
    relative error)``, a graded reward.
    """
    truth_numbers = _NUMBER.findall(str(ground_truth))
    if len(truth_numbers) != 1:
        raise ValueError(f"ground_truth {ground_truth!r} is not one number")
    truth, answer = _float(truth_numbers[0]), final_answer(solution_str)[0]
    given = [_float(number) for number in _NUMBER.findall(answer[-TAIL:])]
    if not given:
        return {"score": 0.0, "acc": 0.0, "format": 0.0, "pred": None}
    error = abs(given[-1] - truth) / max(abs(truth), 1e-12)
    right = error <= tolerance
    return {
        "score": 1.0 if right else partial * max(0.0, 1.0 - error),
        "acc": float(right),
        "format": 1.0,
        "pred": given[-1],
    }


def _truths(ground_truth: Any) -> list[str]:
    """Return all right answers of a text, a list, or JSON of ``{"target": ...}``."""
    if isinstance(ground_truth, str) and ground_truth.lstrip()[:1] in ("{", "["):
        try:
            ground_truth = json.loads(ground_truth)
        except json.JSONDecodeError:
            return [ground_truth]
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth["target"]
    ground_truth = getattr(ground_truth, "tolist", lambda: ground_truth)()
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not truths or any(truth is None for truth in truths):
        raise ValueError(f"ground_truth {ground_truth!r} has no answer")
    return [str(truth) for truth in truths]


def _f1(answer: str, truth: str) -> float:
    given, expected = answer.split(), truth.split()
    if not given or not expected:
        return float(given == expected)
    shared = sum((Counter(given) & Counter(expected)).values())
    return 2 * shared / (len(given) + len(expected))


def _letter_of(truth: Any) -> str:
    if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < 26:
        return string.ascii_uppercase[truth]
    text = str(truth).strip().strip("().").upper()
    if len(text) == 1 and text in string.ascii_uppercase:
        return text
    if text.isdigit() and int(text) < 26:
        return string.ascii_uppercase[int(text)]
    raise ValueError(f"ground_truth {truth!r} is not a letter of a choice")


def _letter(text: str) -> str | None:
    answer, marked = final_answer(text)
    if marked:
        letters: Sequence[str] = _SINGLE_LETTER.findall(answer[:TAIL].upper())
        return letters[0] if len(set(letters)) == 1 else None
    end = text[-TAIL:]
    for pattern in (_BOXED, _STATED):
        if matches := pattern.findall(end):
            return matches[-1].upper()
    letters = _SINGLE_LETTER.findall(end.rstrip()[-40:])
    return letters[-1] if len(set(letters)) == 1 else None


def _float(number: str) -> float:
    return float(number.replace(",", ""))
