"""Scorers that compare answers as text: by words, letter of a choice, or number."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from fractions import Fraction
from typing import Any

from hone.data.answers import TAIL, chosen_letter, final_answer, find_numbers, read_number, tagged_answer
from hone.rewards.scorers.base import graded, register_scorer

MAX_TAGS = 10  # maximum number of answer tags; a response with more is guessing
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_normal(text: str) -> str:
    """Normalise text as SQuAD does: lower case, no punctuation or articles, single spaces; unchanged if nothing is left."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()) or text.strip().casefold()


@register_scorer("f1", "f1", "squad*")
def f1_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score the F1 of words with the ground truth, or with the best of several, in [0, 1].

    The answer is in ``<answer>...</answer>``, after ``####``, or the whole response. Words are normalised as in SQuAD.
    """
    answer, marked = final_answer(solution_str)
    best = max(_f1(squad_normal(answer), squad_normal(truth)) for truth in truths_of(ground_truth))
    return graded(best, right=best == 1.0, marked=marked, pred=answer[:200])


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
    truths = [squad_normal(truth) for truth in truths_of(ground_truth)]
    given = squad_normal(answer or "")
    right = answer is not None and (any(truth in given for truth in truths if truth) if substring else given in truths)
    score = 1.0 if right else format_score if answer is not None else 0.0
    if max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MAX_TAGS:
        score /= 4
    return graded(score, right=right, marked=answer is not None, pred=given or None)


@register_scorer("multiple_choice", "multiple_choice", "mmlu*", "arc*", "gpqa*", "commonsense_qa", "cais/mmlu*")
def multiple_choice_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Score 1 for the right letter.

    The letter is in the last ``<answer>``, ``####`` or ``\boxed{}``, else after the last "answer is". Otherwise it is the single
    letter near the end, if all single letters there are the same. Words such as "a" and "I" are no letters.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the letter, or the number of the choice counted from 0.
        extra_info: not used.
    """
    truth = _letter_of(ground_truth)
    letter = chosen_letter(solution_str)
    return graded(letter == truth, right=letter == truth, marked=letter is not None, pred=letter)


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

    The last number of the answer counts (in a box, ``<answer>``, after ``####`` or "answer is", else of the response). Other numbers
    get ``partial x (1 - relative error)``, a graded reward.
    """
    truths = find_numbers(str(ground_truth))
    if len(truths) != 1:
        raise ValueError(f"ground_truth {ground_truth!r} is not one number")
    answer = final_answer(solution_str, stated=True)[0][-TAIL:]
    whole = read_number(answer)
    given = whole or next(reversed(find_numbers(answer)), None)
    if given is None:
        return graded(0.0, right=False, marked=False, pred=None)
    error = float(abs(given.value - truths[0].value) / max(abs(truths[0].value), Fraction(1, 10**12)))
    right = error <= tolerance or given.agrees(truths[0])
    score = 1.0 if right else partial * max(0.0, 1.0 - error)
    return graded(score, right=right, marked=True, pred=float(given.value))


def truths_of(ground_truth: Any) -> list[str]:
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
