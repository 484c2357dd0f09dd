"""Student's t distribution with an integer number of degrees of freedom."""

from __future__ import annotations

import math
from statistics import NormalDist

_MANY = 400  # degrees of freedom from which two terms of the expansion around the normal are exact to 1e-5


def student_cdf(t: float, degrees: int) -> float:
    """Return P(T <= t).

    The finite sums are those of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.

    Args:
        t: a number.
        degrees: degrees of freedom, at least 1.
    """
    angle = math.atan2(t, math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = (1.0, 1.0) if degrees % 2 == 0 else (cosine, cosine)
    for power in range(2 if degrees % 2 == 0 else 3, degrees - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    if degrees % 2 == 0:
        within = sine * total
    else:
        within = 2 / math.pi * (angle + (sine * total if degrees > 1 else 0.0))
    return 0.5 + within / 2


def student_quantile(probability: float, degrees: int) -> float:
    """Return the t with P(T <= t) = ``probability``.

    >>> round(student_quantile(0.975, 2), 3)
    4.303

    Args:
        probability: between 0 and 1, both excluded.
        degrees: degrees of freedom, at least 1.
    """
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    if degrees >= _MANY:
        normal = NormalDist().inv_cdf(probability)
        return normal + (normal**3 + normal) / (4 * degrees)
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2
