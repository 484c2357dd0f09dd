"""Two arms of runs compared seed by seed and prompt by prompt: the difference, its interval, and the seeds that are needed.

An arm is a configuration, and its runs differ in their seeds. Runs of the two arms that share a seed draw the same prompts and the
same random numbers, so what they have in common cancels in the difference.

Sequential test of paired differences that may stop after any pair.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_MANY = 400  # degrees of freedom from which two terms of the expansion around the normal are exact to 1e-5


def student_cdf(t: float, degrees: int) -> float:
    """Return P(T <= t).

    The finite sums are those of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
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


Scores = Mapping[str, Mapping[str, float]]
"""Seed to prompt to score."""

DRAWS = 4000
_CHUNK = 500  # bootstrap draws that are in memory together
MOST_SEEDS = 1000


class Verdict(StrEnum):
    """Result of a comparison."""

    SECOND_BETTER = "second better"
    FIRST_BETTER = "first better"
    WITHIN_NOISE = "within noise"


@dataclass(frozen=True)
class PairedScores:
    """Scores of two arms where both have one."""

    seeds: tuple[str, ...]  # seeds of the pairs, ``S``
    prompts: tuple[str, ...]  # prompts that some pair has, ``P``
    first: NDArray[np.float64]  # scores of the first arm, ``[S, P]``, NaN where the pair lacks the prompt
    second: NDArray[np.float64]  # the same of the second arm

    @property
    def differences(self) -> NDArray[np.float64]:
        """Second minus first, ``[S, P]``."""
        return self.second - self.first

    def seed_means(self) -> list[float]:
        return [float(np.nanmean(row)) for row in self.differences]


def pair_scores(first: Scores, second: Scores) -> PairedScores:
    """Pair the scores of two arms by seed and prompt; what only one arm has is left out.

    Raises:
        ValueError: no seed has a prompt in both arms.
    """
    seeds = [seed for seed in first if seed in second and first[seed].keys() & second[seed].keys()]
    if not seeds:
        raise ValueError("no seed has a prompt in both arms")
    prompts = list(dict.fromkeys(prompt for seed in seeds for prompt in first[seed] if prompt in second[seed]))
    sides = []
    for mine, other in ((first, second), (second, first)):
        rows = [
            [mine[seed][p] if p in mine[seed] and p in other[seed] else math.nan for p in prompts] for seed in seeds
        ]
        sides.append(np.array(rows, dtype=np.float64))
    return PairedScores(tuple(seeds), tuple(prompts), sides[0], sides[1])


@dataclass(frozen=True)
class Comparison:
    """Result of comparing the second arm with the first."""

    first: float  # mean score of the first arm over the paired cells
    second: float  # mean score of the second arm
    difference: float  # second minus first
    low: float  # lower end of the interval of the difference; NaN if one number per arm is all there is
    high: float  # upper end of the interval
    level: float  # level of the interval
    seeds: int  # number of pairs of runs
    prompts: int
    verdict: Verdict  # the better arm, or within noise
    # pairs of runs that find a difference of this size with 80 % power; None if it cannot be estimated
    seeds_needed: int | None


def compare_paired(
    scores: PairedScores, *, more_is_better: bool = True, level: float = 0.95, effect: float | None = None
) -> Comparison:
    """Compare two arms; ``effect`` is the difference that the needed seeds should find, None means the observed one."""
    differences = scores.differences
    low, high = bootstrap_interval(differences, level)
    verdict = Verdict.WITHIN_NOISE
    if low > 0 or high < 0:
        verdict = Verdict.SECOND_BETTER if (low > 0) == more_is_better else Verdict.FIRST_BETTER
    present = ~np.isnan(differences)
    mean = float(differences[present].mean())
    needed = seeds_needed(scores.seed_means(), mean if effect is None else effect, level)
    return Comparison(
        float(scores.first[present].mean()),
        float(scores.second[present].mean()),
        *(mean, low, high, level, len(scores.seeds), len(scores.prompts), verdict, needed),
    )


def bootstrap_interval(
    differences: NDArray[np.float64], level: float = 0.95, *, draws: int = DRAWS
) -> tuple[float, float]:
    """Return a bootstrap interval of the mean over seeds and prompts.

    Seeds and prompts are resampled independently, because the same prompts recur in every seed: the pigeonhole bootstrap of Owen
    (2007, The pigeonhole bootstrap, Annals of Applied Statistics 1), which is conservative. Percentiles of few units are too
    narrow, so the interval is widened to the quantiles of Student's t (Hesterberg 2015, What teachers should know about the
    bootstrap, The American Statistician 69). With one seed only the prompts are resampled.

    ``differences [S, P]`` are NaN where a cell is missing; the ends of a single cell are NaN.
    """
    seeds, prompts = differences.shape
    present = ~np.isnan(differences)
    if seeds == prompts == 1:
        return math.nan, math.nan
    values, cells = np.where(present, differences, 0.0), present.astype(np.float64)
    mean = values.sum() / cells.sum()
    generator = np.random.default_rng(0)
    means = []
    for start in range(0, draws, _CHUNK):
        size = min(_CHUNK, draws - start)
        by_seed, by_prompt = _resampled(generator, seeds, size), _resampled(generator, prompts, size)
        weight = np.einsum("bp,bp->b", by_seed @ cells, by_prompt)
        total = np.einsum("bp,bp->b", by_seed @ values, by_prompt)
        means.append(total[weight > 0] / weight[weight > 0])
    units = seeds if seeds > 1 else prompts
    tail = (1 - level) / 2
    wider = math.sqrt(units / (units - 1)) * student_quantile(1 - tail, units - 1) / NormalDist().inv_cdf(1 - tail)
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(mean + wider * (low - mean)), float(mean + wider * (high - mean))


def _resampled(generator: np.random.Generator, units: int, draws: int) -> NDArray[np.float64]:
    """Return how often each unit is in each resample, ``[draws, units]``."""
    if units == 1:
        return np.ones((draws, 1))
    return generator.multinomial(units, np.full(units, 1 / units), size=draws).astype(np.float64)


def seeds_needed(
    seed_means: list[float], effect: float, level: float = 0.95, *, power: float = 0.8, most: int = MOST_SEEDS
) -> int | None:
    """Return the pairs of runs with which a two-sided paired t-test finds a difference of ``effect``, at least 2.

    None with fewer than two pairs so far, an effect of 0, or if more than ``most`` are needed.
    """
    if len(seed_means) < 2 or effect == 0:
        return None
    spread = float(np.std(seed_means, ddof=1))
    if spread == 0:
        return 2
    normal = NormalDist()
    fewest = ((normal.inv_cdf((1 + level) / 2) + normal.inv_cdf(power)) * spread / effect) ** 2  # t needs more
    for count in range(max(2, math.ceil(min(fewest, most + 1))), most + 1):
        shift = abs(effect) / spread * math.sqrt(count)
        if shift >= student_quantile((1 + level) / 2, count - 1) + student_quantile(power, count - 1):
            return count
    return None


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
