"""Sequential test of paired differences that may stop after any pair.

If two arms are equally good, a difference is as likely as its negative: its sign is a fair coin, whatever its size. A bettor on
the signs then has a fair game. The stake on pair ``i`` is a share ``tanh(k |d_i| / s_i)`` of the capital, where ``s_i`` is the root
mean square of the differences up to ``i``. Sizes tell nothing about signs, so the stake may depend on them. Capital that starts at 1
is a martingale, and by Ville's inequality exceeds ``1 / a`` at any time with probability at most ``a``. This is the e-process of
Vovk and Wang (2024, Nonparametric e-tests of symmetry, New England Journal of Statistics in Data Science 2) with stakes that do
not depend on the unit of the score; normality is not assumed.

"No difference" is two such tests, against a difference of ``margin`` and of ``-margin``; both must be rejected. They assume that
the differences are symmetric around their centre with one peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

STAKES = ((2.0, 0.75), (0.5, 0.25))
"""Steepness k of a bettor, and its share of the capital at the start."""
FORECASTS = 100
MOST_FORECAST = 60


class Outcome(StrEnum):
    """Outcome of a sequential comparison."""

    SECOND_BETTER = "second better"
    FIRST_BETTER = "first better"
    NO_DIFFERENCE = "no difference"
    STILL_NOISE = "still noise"


class SignBets:
    """Capital of bets that differences are positive, and of bets that they are negative.

    >>> bets = SignBets()
    >>> for difference in (0.3, 0.2, 0.4):
    ...     bets.add(difference)
    >>> bets.positive > 4 > 1 > bets.negative
    True
    """

    def __init__(self) -> None:
        self._count, self._squares = 0, 0.0
        self._capital = {sign: [share for _, share in STAKES] for sign in (1, -1)}

    def add(self, difference: float) -> None:
        """Settle the bets on the next difference; a difference of 0 changes no capital."""
        self._count += 1
        self._squares += difference * difference
        if self._squares == 0:
            return
        size = abs(difference) / math.sqrt(self._squares / self._count)
        for sign, capital in self._capital.items():
            for place, (steepness, _) in enumerate(STAKES):
                capital[place] *= 1 + sign * math.copysign(math.tanh(steepness * size), difference)

    @property
    def positive(self) -> float:
        return sum(self._capital[1])

    @property
    def negative(self) -> float:
        return sum(self._capital[-1])

    @property
    def either(self) -> float:
        """Capital of a bettor with half on each side."""
        return (self.positive + self.negative) / 2


class SequentialTest:
    """The three tests of a comparison, updated pair by pair.

    ``margin`` is the smallest difference that matters; ``level`` is 1 minus the error rate of each outcome.
    """

    def __init__(self, margin: float, level: float) -> None:
        self.margin, self.level = margin, level
        self.equal, self.above_low, self.below_high = SignBets(), SignBets(), SignBets()

    def add(self, difference: float) -> Outcome:
        """Add the difference of the next pair, and return the outcome after it."""
        self.equal.add(difference)
        self.above_low.add(difference + self.margin)
        self.below_high.add(difference - self.margin)
        threshold = 1 / (1 - self.level)
        if self.equal.either >= threshold * (1 - 1e-9):
            return Outcome.SECOND_BETTER if self.equal.positive > self.equal.negative else Outcome.FIRST_BETTER
        if self.evidence_of_none >= threshold * (1 - 1e-9):
            return Outcome.NO_DIFFERENCE
        return Outcome.STILL_NOISE

    @property
    def evidence_of_none(self) -> float:
        """The smaller capital of the tests against a difference of the margin."""
        return min(self.above_low.positive, self.below_high.negative)


@dataclass(frozen=True)
class Decision:
    """State of a sequential comparison."""

    outcome: Outcome  # the decision; :attr:`Outcome.STILL_NOISE` while there is none
    confidence: float  # 1 minus the error probability that the outcome has at any time; 0 without an outcome
    pairs: int  # pairs after which it was made, or all
    difference: float  # mean difference of these pairs


def decide(
    differences: Sequence[float], *, margin: float, level: float = 0.95, more_is_better: bool = True
) -> Decision:
    """Test differences (second minus first, one per pair) in their order, and stop at the first decision.

    ``margin`` and ``level`` are those of :class:`SequentialTest`.
    """
    signed = [difference if more_is_better else -difference for difference in differences]
    test = SequentialTest(margin, level)
    for pairs, difference in enumerate(signed, 1):
        outcome = test.add(difference)
        if outcome is not Outcome.STILL_NOISE:
            capital = test.evidence_of_none if outcome is Outcome.NO_DIFFERENCE else test.equal.either
            return Decision(outcome, 1 - 1 / capital, pairs, math.fsum(differences[:pairs]) / pairs)
    pairs = len(differences)
    mean = math.fsum(differences) / pairs if pairs else 0.0
    return Decision(Outcome.STILL_NOISE, 0.0, pairs, mean)


def forecast_pairs(differences: Sequence[float], *, margin: float, level: float = 0.95) -> int | None:
    """Return the median number of further pairs until a decision, if they resemble the pairs so far, which led to none.

    None with fewer than 2 pairs, or if more than :data:`MOST_FORECAST` are needed.
    """
    if len(differences) < 2:
        return None
    generator, needed = np.random.default_rng(0), []
    for _ in range(FORECASTS):
        test = SequentialTest(margin, level)
        for difference in differences:
            test.add(difference)
        drawn = generator.choice(np.array(differences), MOST_FORECAST).tolist()
        ends = (count for count, value in enumerate(drawn, 1) if test.add(value) is not Outcome.STILL_NOISE)
        needed.append(next(ends, MOST_FORECAST + 1))
    median = math.ceil(np.median(needed))
    return median if median <= MOST_FORECAST else None
