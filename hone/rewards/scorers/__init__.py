"""Built-in scorers, chosen by ``data_source`` (or for all rows by ``reward.scorer``, or as terms by ``reward.terms``)."""

from hone.rewards.scorers import (
    code,
    countdown,
    digit_sequence,
    exact,
    gsm8k,
    gym,
    judged,
    matching,
    math_answer,
    math_dapo,
    structured,
    text_shape,
    tool_use,
)
from hone.rewards.scorers.base import SCORERS, Scorer, register_scorer, scorer_for

__all__ = [
    "SCORERS",
    "Scorer",
    "code",
    "countdown",
    "digit_sequence",
    "exact",
    "gsm8k",
    "gym",
    "judged",
    "matching",
    "math_answer",
    "math_dapo",
    "register_scorer",
    "scorer_for",
    "structured",
    "text_shape",
    "tool_use",
]
