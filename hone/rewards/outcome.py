"""Conversion of a scorer's return value, or of the exception that it raised, to a :class:`Score`."""

from __future__ import annotations

import math
import numbers
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from hone.errors import NoVerdict
from hone.insight.redaction import redact_text
from hone.rewards.score import Cause, Score
from hone.text import valid_data, valid_text

LARGEST = 1e16
"""Largest absolute reward or term: the sum of a million squares of it is finite in float32, in which advantages are computed."""
MAX_NESTING = 32
"""Levels of lists and dicts that are kept of an extra value; writers and trackers walk through them recursively."""
PLACED = ("turn_rewards", "token_rewards")  # keys of a returned dict that assign the score to turns or tokens


def to_score(value: Any) -> Score:
    """Convert the return value of a scorer: a number, or a dict with ``score``.

    Other numeric entries of the dict become terms, the rest is kept as extra. None, :class:`NoVerdict` and a value that is not a
    finite number of at most :data:`LARGEST` are no verdict, never a silent 0.
    """
    if value is None:
        return failed("returned None", Cause.DECLINED)
    if isinstance(value, NoVerdict):
        return failed(f"returned NoVerdict: {value.reason}", Cause(value.cause))
    if isinstance(value, Mapping):
        return _from_mapping(value)
    number = as_number(value)
    if number is None:
        return failed(f"returned {_describe(value)}, not a number or a dict with 'score'")
    return Score(number) if is_usable(number) else failed(f"returned {shown_number(number)}")


def to_scores(value: Any, count: int) -> list[Score]:
    """Convert the return value of a function that scored ``count`` responses in one call.

    It must be a sequence of values for :func:`to_score`; otherwise no response has a verdict.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple) or len(value) != count:
        return [failed(f"returned {_describe(value)}, not a list of {count} scores")] * count
    return [to_score(entry) for entry in value]


def failed(error: str, cause: Cause = Cause.INVALID) -> Score:
    return Score(0.0, error=valid_text(error), cause=cause)


def failed_by(error: BaseException, shown: str) -> Score:
    """Return the score of a response whose scoring raised; ``shown`` is the error in one line, and may hold a secret."""
    return failed(redact_text(shown), Cause(error.cause) if isinstance(error, NoVerdict) else Cause.RAISED)


def is_usable(number: float) -> bool:
    """Return whether a reward is finite, and small enough that float32 can compute with it."""
    return math.isfinite(number) and abs(number) <= LARGEST


def shown_number(number: float) -> str:
    """Return a number that is not usable, with the limit if it is a finite one."""
    return f"{number:g}, more than {LARGEST:g} in absolute value" if math.isfinite(number) else str(number)


def as_number(value: Any) -> float | None:
    """Convert a number, bool, or numpy or torch scalar to a float; return None for anything else.

    A number beyond the range of floats becomes infinite.
    """
    if not isinstance(value, numbers.Real):
        item = getattr(value, "item", None)
        value = item() if callable(item) and getattr(value, "ndim", None) == 0 else None
    if not isinstance(value, numbers.Real):
        return None
    number: Any = value  # comparisons of Real are not declared
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _from_mapping(value: Mapping[Any, Any]) -> Score:
    if "score" not in value:
        return failed(f"returned a dict without 'score'; it has {sorted(map(str, value))}")
    score = to_score(value["score"]) if not isinstance(value["score"], Mapping) else failed("'score' is a dict")
    if score.error is not None:
        score.error = score.error.replace("returned", "'score' is", 1)
        return score
    for key, entry in value.items():
        name, number = valid_text(str(key)), as_number(entry)
        if name == "score":
            continue
        if name in PLACED:
            rewards = _numbers(entry)
            if rewards is None:
                return failed(f"'{name}' is {_describe(entry)}, not a list of finite numbers")
            setattr(score, name, rewards)
        elif number is None:
            score.extra[name] = valid_data(_plain_data(entry))
        elif is_usable(number):
            score.terms[name] = number
        else:
            return failed(f"term '{name}' is {shown_number(number)}")
    return score


def _numbers(value: Any) -> list[float] | None:
    """Convert a sequence or array of finite numbers to a list; return None for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        return None
    numbers = [as_number(entry) for entry in value]
    finite = [number for number in numbers if number is not None and is_usable(number)]
    return finite if len(finite) == len(numbers) else None


def _plain_data(value: Any, level: int = 0) -> Any:
    """Convert a value to plain data: arrays to lists, other objects and what is below :data:`MAX_NESTING` levels to text."""
    if level > MAX_NESTING:
        return f"{type(value).__name__}, nested too deeply to be kept"
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_data(entry, level + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain_data(entry, level + 1) for entry in value]
    return repr(value)


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    size = f" of length {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{size} ({str(value)[:60]!r})"


LATEST = 64  # number of latest responses over which the rate is taken; a larger batch counts as a whole
FEWEST = 16
"""Number of responses from which on a rate is meaningful: fewer are treated as if the missing ones all had a verdict."""


class NoVerdictRate:
    """Rate of missing verdicts over the latest responses. ``limit``: largest rate that is tolerated, 0 to 1."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._latest: deque[tuple[int, int]] = deque()  # (missing, responses) of each call

    @property
    def counted(self) -> int:
        return sum(count for _, count in self._latest)

    def allowed(self, count: int) -> int:
        """Return how many of the next ``count`` responses may lack a verdict."""
        earlier = self._window(count)
        responses, missing = count + sum(c for _, c in earlier), sum(m for m, _ in earlier)
        return max(0, int(self._limit * max(responses, FEWEST if self._limit else 0) + 1e-9) - missing)

    def add(self, missing: int, count: int) -> bool:
        """Count the responses of a call; return whether there are more missing verdicts than tolerated."""
        allowed = self.allowed(count)
        self._latest = deque([*self._window(count), (missing, count)])
        return missing > allowed

    def _window(self, count: int) -> list[tuple[int, int]]:
        """Return the latest calls that fit into :data:`LATEST` responses together with ``count`` more."""
        kept: list[tuple[int, int]] = []
        for missing, responses in reversed(self._latest):
            count += responses
            if count > LATEST:
                break
            kept.insert(0, (missing, responses))
        return kept


def no_verdict_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Return ``reward/no_verdict_rate``, and the number of responses by cause as ``reward/no_verdict/<cause>``."""
    causes = Counter(str(score.cause) for score in scores if score.error is not None)
    counts = {f"reward/no_verdict/{cause.value}": float(causes[cause]) for cause in Cause if causes[cause]}
    return {"reward/no_verdict_rate": sum(causes.values()) / max(1, len(scores)), **counts}
