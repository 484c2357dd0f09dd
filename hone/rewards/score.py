"""The outcome of scoring one response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Score:
    """What a scorer said of one response.

    Attributes:
        total: the reward of the whole response.
        terms: named numeric parts of it, each logged as ``reward/<name>/mean`` (for example ``acc``, ``format``).
        extra: anything else the scorer returned (for example ``pred``, used by maj@n), kept with the sample.
        error: why scoring failed, or None. A failed score has total 0, is counted in ``reward/error_rate`` and shown.
        unshaped: the reward before the trainer punished its length, None when it did not.
        turn_rewards: parts of the total earned by each assistant turn, as the scorer gave them.
        token_rewards: parts of the total earned by each token of the response, as the scorer gave them.
        placed: where those parts stand: token of the response to reward. What they do not hold of the total stands on the
            last sampled token.
        elsewhere: what of the total stands in other parts of the episode, where it left several.
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
        """The reward that the reward function gave."""
        return self.total if self.unshaped is None else self.unshaped
