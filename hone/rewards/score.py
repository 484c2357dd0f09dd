"""Score of one response."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """Cause of a missing verdict."""

    DECLINED = "declined"
    """The reward function returned None."""
    INFRASTRUCTURE = "infrastructure"
    """The reward function returned or raised :class:`~hone.errors.NoVerdict`."""
    RAISED = "raised"
    """The reward function raised another exception."""
    INVALID = "invalid"
    """The reward function returned something that is not a usable score."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    """The call needed more memory than ``reward.memory_mb``."""
    CRASH = "crash"
    """The call ended its process."""
    SERVICE = "service"
    """A judge or a reward server gave no usable answer."""
    SANDBOX = "sandbox"
    """The sandbox failed, not the program in it."""
    EPISODE = "episode"
    """A tool, an environment or an agent loop failed."""

    @property
    def may_pass(self) -> bool:
        """True if a further try of the same response may succeed."""
        return self in (Cause.INFRASTRUCTURE, Cause.TIMEOUT, Cause.CRASH, Cause.SERVICE, Cause.SANDBOX)


@dataclass
class Score:
    """Score of one response.

    Attributes:
        total: reward of the complete response.
        terms: named numbers of the scorer, each logged as ``reward/<name>/mean`` (for example ``acc``, ``format``).
        extra: other values that the scorer returned (for example ``pred``, used by maj@n), kept with the sample.
        error: why there is no verdict, or None. Such a score has no meaning besides: the response is left out.
        cause: kind of the error; None with a verdict.
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
    cause: Cause | None = None
    unshaped: float | None = None
    turn_rewards: list[float] | None = None
    token_rewards: list[float] | None = None
    placed: dict[int, float] = field(default_factory=dict)
    elsewhere: float = 0.0

    @property
    def verdict(self) -> float | None:
        """Reward, or None without a verdict."""
        return self.total if self.error is None else None

    @property
    def passes(self) -> bool:
        """True if the response passes: ``acc`` is 1, or without ``acc`` the reward is positive; False without a verdict."""
        return self.error is None and self.terms.get("acc", float(self.quality > 0)) >= 1.0

    @property
    def quality(self) -> float:
        """Reward that the reward function returned."""
        return self.total if self.unshaped is None else self.unshaped
