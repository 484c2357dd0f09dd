"""Responses without a verdict: how many a run tolerates, their metrics, and the rows that remain."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from hone.rewards.score import Cause, Score

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
