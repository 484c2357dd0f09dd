"""Score of one response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Score:
    """Score of one response.

    Attributes:
        total: reward of the complete response.
        terms: named numbers of the scorer, each logged as ``reward/<name>/mean`` (for example ``acc``, ``format``).
        extra: other values that the scorer returned (for example ``pred``, used by maj@n), kept with the sample.
        error: error of failed scoring, or None. A failed score has total 0 and counts in ``reward/error_rate``.
        unshaped: reward before the trainer's length penalty; None without one.
        turn_rewards: parts of the total earned by each assistant turn, as returned by the scorer.
        token_rewards: parts of the total earned by each token of the response, as returned by the scorer.
        placed: rewards by token of the response. The rest of the total is placed on the last sampled token.
        elsewhere: share of the total that is placed in other segments of the episode.
    """

    total: float
    terms: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    unshaped: float | None = None
    turn_rewards: list[float] | None = None
    token_rewards: list[float] | None = None
    placed: dict[int, float] = field(default_factory=dict)
    elsewhere: float = 0.0

    @property
    def quality(self) -> float:
        """Reward that the reward function returned."""
        return self.total if self.unshaped is None else self.unshaped
