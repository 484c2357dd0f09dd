"""Sweeps in Hydra's multirun grammar: lists, ``range``, ``choice``, ``interval``, and ``tag(log, ...)`` for logarithmic draws."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hone.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MOST_TRIALS = 10_000
_MOST_REPEATS = 100_000  # draws in a row that repeat a trial, after which all values of narrow intervals count as drawn


@dataclass(frozen=True)
class SweepAxis:
    """Key with several values."""

    key: str
    values: tuple[str, ...] = ()  # its values as override texts; empty for an interval
    low: float = 0.0  # lower end of an interval
    high: float = 0.0  # upper end of an interval
    logarithmic: bool = False  # True for draws that are uniform in the logarithm
    whole: bool = False  # True for an interval of whole numbers

    @property
    def size(self) -> float:
        """Number of different values; infinite for an interval of real numbers."""
        if self.values:
            return len(self.values)
        return int(self.high) - int(self.low) + 1 if self.whole else math.inf

    def draw(self, generator: random.Random) -> str:
        if self.values:
            return generator.choice(self.values)
        if self.whole and not self.logarithmic:
            return str(generator.randint(int(self.low), int(self.high)))
        share = generator.random()
        if self.logarithmic:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        return str(round(value)) if self.whole else f"{value:.6g}"


def parse_sweep(words: Sequence[str]) -> tuple[list[str], list[SweepAxis]]:
    """Separate the overrides that sweep a key from those that set one value.

    Returns the overrides with one value, unchanged; and an axis for each of the others.

    Raises ConfigError: an override is malformed, or its values cannot be listed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    from hone.config.overrides import one_line

    parser, fixed, axes = OverridesParser.create(), [], []
    for word in words:
        try:
            (override,) = parser.parse_overrides([word])
        except OverrideParseException as error:
            raise ConfigError(
                f"'{word}' cannot be read: {one_line(error)}",
                fix="key=1,2,3, key=range(1,10,3), key=choice(a,b) or key=interval(0.1,1)",
                where="command line",
            ) from None
        if override.is_sweep_override():
            axes.append(_axis(override, word))
        else:
            fixed.append(word)
    keys = [axis.key for axis in axes]
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        raise ConfigError("is swept twice", fix=f"write all values in one list: {repeated}=1,2,3", where=repeated)
    return fixed, axes


def _axis(override: Override, word: str) -> SweepAxis:
    from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, RangeSweep, Transformer

    key, sweep = override.get_key_element(), override.value()
    if isinstance(sweep, ChoiceSweep | RangeSweep):
        listed = (str(value) for value in override.sweep_iterator(transformer=Transformer.encode))
        values = tuple(dict.fromkeys(listed))  # a value that is written twice is one trial
        if not values:
            raise ConfigError("has no values", fix=f"{key}=1,2,3", where=word)
        return SweepAxis(key, values)
    if not isinstance(sweep, IntervalSweep) or sweep.start is None or sweep.end is None:
        raise ConfigError(
            "names values that only Hydra's config groups have", fix=f"list them: {key}=choice(a,b)", where=word
        )
    low, high, logarithmic = float(sweep.start), float(sweep.end), "log" in sweep.tags
    if low >= high or (logarithmic and low <= 0):
        raise ConfigError(
            f"the interval from {low:g} to {high:g} is empty"
            if low >= high
            else "a logarithmic interval begins above 0",
            fix=f"{key}=interval(0.1,1)",
            where=word,
        )
    whole = isinstance(sweep.start, int) and isinstance(sweep.end, int)
    return SweepAxis(key, low=low, high=high, logarithmic=logarithmic, whole=whole)


def grid(axes: Sequence[SweepAxis]) -> list[dict[str, str]]:
    """Return all combinations, the last axis fastest.

    Raises ConfigError: an axis is an interval, or there are too many combinations.
    """
    interval = next((axis for axis in axes if not axis.values), None)
    if interval is not None:
        raise ConfigError(
            "an interval has no grid", fix="--random N draws N trials from it, or list values", where=interval.key
        )
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_TRIALS:
        raise ConfigError(f"the grid has {count:,} trials", fix="--random N draws N of them", where="command line")
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def draw_trials(axes: Sequence[SweepAxis], count: int, seed: int) -> list[dict[str, str]]:
    """Return ``count`` different random combinations, or all if there are fewer.

    The first trials of a larger draw are those of a smaller one.
    """
    generator, repeats = random.Random(seed), 0
    trials: dict[tuple[str, ...], None] = {}
    while len(trials) < min(count, math.prod(axis.size for axis in axes)) and repeats < _MOST_REPEATS:
        values = tuple(axis.draw(generator) for axis in axes)
        repeats = repeats + 1 if values in trials else 0
        trials[values] = None
    return [dict(zip((axis.key for axis in axes), values, strict=True)) for values in trials]
