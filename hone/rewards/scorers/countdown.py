"""Scorer of countdown: an arithmetic expression that uses the given numbers and reaches the target."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections import Counter
from fractions import Fraction
from typing import Any

from hone.data.answers import final_answer, plain_text
from hone.rewards.scorers.base import graded, register_scorer

MAX_CHARACTERS = 256  # maximum length of an expression in characters

_DIVIDED = ("÷", "\\div")
_SIGNS = re.compile(r"×|÷|\\times|\\cdot|\\div")
_ALLOWED = re.compile(r"[0-9+\-*/() ]+")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@register_scorer("countdown", "countdown")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Score 1 for an expression in + - * / that uses each number exactly once and equals the target (exact arithmetic).

    Args:
        data_source: not used.
        solution_str: the response; the expression is in a box, ``<answer>...</answer>`` or after ``####``, else the whole response.
            Text after an equals sign is ignored.
        ground_truth: ``{"target": 33, "numbers": [3, 7, 12]}``, as JSON text or as a dict.
        extra_info: not used.
        format_score: reward of a valid expression with the right numbers and a wrong value.

    Returns:
        ``score``; ``acc``; ``format`` (1 for a valid expression with the right numbers); ``pred`` (its value, or None).

    Raises:
        ValueError: the ground truth is invalid.
    """
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    target, numbers = Fraction(truth["target"]), [int(number) for number in truth["numbers"]]
    answer = plain_text(final_answer(solution_str, stated=True)[0][:1000]).partition("=")[0]
    value = evaluate(_SIGNS.sub(lambda sign: "*/"[sign[0] in _DIVIDED], answer).strip(), numbers)
    correct = value == target
    reward = 1.0 if correct else format_score if value is not None else 0.0
    pred = None if value is None else str(value)
    return graded(reward, right=correct, marked=value is not None, pred=pred)


def evaluate(expression: str, numbers: list[int]) -> Fraction | None:
    """Return the value of an expression that uses exactly ``numbers``; None if it is invalid or divides by zero."""
    if len(expression) > MAX_CHARACTERS or not _ALLOWED.fullmatch(expression):
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
        used: list[int] = []
        value = _value(tree, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value if Counter(used) == Counter(numbers) else None


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError(f"{type(node).__name__} is not allowed")
