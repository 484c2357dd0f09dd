"""Scorer of mathematics: compare final answers by math-verify if installed, else as normalised text."""

from __future__ import annotations

import importlib.util
import logging
import re
from fractions import Fraction
from typing import Any

from hone.rewards.scorers.base import final_answer, register_scorer

TAIL = 1000
"""Characters at the end of a response that are searched if no answer is marked."""

_UNITS = re.compile(r"\\(?:text|mbox|mathrm)\{[^{}]*\}")
_SPACING = re.compile(r"\\[!,;: ]|\\left|\\right|\\\$|\$|\s|\\%|%|\^\{?\\circ\}?")
_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}|(-?)\\frac(\d)(\d)")
_STATED = re.compile(r"(?:final )?answer(?: is|:)\s*([^\n]+)", re.IGNORECASE)


def _installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _import() -> None:
    if _installed():
        # it warns that its time limits are off; the worker's limit is on
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        _verify("1", "1", marked=True)


@register_scorer(
    "math",
    *("math", "math_*", "MATH", "aime*", "numina_*", "lighteval/MATH*", "DigitalLearningGmbH/MATH-lighteval"),
    "HuggingFaceH4/MATH-500",
    may_hang=True,
    prepare=_import,
)
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Score 1 if the response's final answer is mathematically equal to the ground truth.

    The answer is in the last ``\boxed{...}``, else in ``<answer>...</answer>`` or after ``####``, else after the last
    "answer is", else the end of the response is searched. Only the last box counts: listing guesses does not help.

    Returns:
        ``score``; ``acc``; ``format`` (1 if an answer is marked); ``pred``; ``verifier``: "math-verify", or "exact" (equal
        as normalised text or as fractions of integers) if that package is not installed.
    """
    answer, marked = extract(solution_str)
    truth = boxed(str(ground_truth)) or str(ground_truth)
    if _installed():
        correct, verifier = normalise(answer) == normalise(truth) or _verify(answer, truth, marked), "math-verify"
    else:
        correct, verifier = equal(answer, truth), "exact"
    return {
        "score": float(correct),
        "acc": float(correct),
        "format": float(marked),
        "pred": answer[:200],
        "verifier": verifier,
    }


def extract(text: str) -> tuple[str, bool]:
    """Return the final answer of a response, and whether it was marked as such."""
    inside = boxed(text)
    if inside is not None:
        return inside, True
    answer, marked = final_answer(text)
    if marked:
        return answer, True
    matches = _STATED.findall(text[-TAIL:])
    return (matches[-1].strip().rstrip("."), True) if matches else (text[-TAIL:].strip(), False)


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` (or ``\fbox``) with balanced braces, or None."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def equal(answer: str, truth: str) -> bool:
    """Compare as normalised text, or as integers, decimals and fractions of them."""
    left, right = normalise(answer), normalise(truth)
    if left == right:
        return True
    values = [_number(text) for text in (left, right)]
    return values[0] is not None and values[0] == values[1]


def normalise(text: str) -> str:
    """Remove spacing, units, dollar signs, thousands separators, "x =" and a final full stop."""
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",").strip().rstrip(".")
    text = _SPACING.sub("", _UNITS.sub("", text))
    text = re.sub(r"^[a-zA-Z]=", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"^(-?)\.(?=\d)", r"\g<1>0.", text)


def _number(text: str) -> Fraction | None:
    match = _FRACTION.fullmatch(text)
    if match:
        sign, top, bottom = match.group(1, 2, 3) if match.group(2) else match.group(4, 5, 6)
        text = f"{top}/{bottom}" if not sign else f"{-int(top)}/{bottom}"
        if int(bottom) < 0:
            text = f"{-int(text.partition('/')[0])}/{-int(bottom)}"
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def _verify(answer: str, truth: str, marked: bool) -> bool:
    from math_verify import parse, verify

    def read(text: str) -> list[Any]:
        # the worker's time limit covers parsing and comparing; the package's limit uses signals
        return parse(text, parsing_timeout=0)

    parsed = read(f"\\boxed{{{answer}}}" if marked else answer)
    return bool(parsed) and verify(read(f"\\boxed{{{truth}}}"), parsed, timeout_seconds=0)
