"""Built-in scorers, chosen by ``data_source`` (or for all rows by ``reward.scorer``)."""

from hone.rewards.scorers import countdown, digit_sequence, exact, gsm8k, gym, math_answer
from hone.rewards.scorers.base import SCORERS, Scorer, register_scorer, scorer_for

__all__ = [
    "SCORERS",
    "Scorer",
    "countdown",
    "digit_sequence",
    "exact",
    "gsm8k",
    "gym",
    "math_answer",
    "register_scorer",
    "scorer_for",
]
