"""Score of one response."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """Cause of a missing verdict."""

    DECLINED = "declined"  # the reward function returned None
    INFRASTRUCTURE = "infrastructure"  # the reward function returned or raised :class:`~hone.errors.NoVerdict`
    RAISED = "raised"  # the reward function raised another exception
    INVALID = "invalid"  # the reward function returned something that is not a usable score
    TIMEOUT = "timeout"
    MEMORY = "memory"  # the call needed more memory than ``reward.memory_mb``
    CRASH = "crash"  # the call ended its process
    SERVICE = "service"  # a judge or a reward server gave no usable answer
    SANDBOX = "sandbox"  # the sandbox failed, not the program in it
    EPISODE = "episode"  # a tool, an environment or an agent loop failed

    @property
    def may_pass(self) -> bool:
        return self in (Cause.INFRASTRUCTURE, Cause.TIMEOUT, Cause.CRASH, Cause.SERVICE, Cause.SANDBOX)


@dataclass
class Score:
    """Score of one response."""

    total: float  # reward of the complete response
    # named numbers of the scorer, each logged as ``reward/<name>/mean`` (for example ``acc``, ``format``)
    terms: dict[str, float] = field(default_factory=dict)
    # other values that the scorer returned (for example ``pred``, used by maj@n), kept with the sample
    extra: dict[str, Any] = field(default_factory=dict)
    # why there is no verdict, or None. Such a score has no meaning besides: the response is left out
    error: str | None = None
    cause: Cause | None = None  # kind of the error; None with a verdict
    unshaped: float | None = None  # reward before the trainer's length penalty; None without one
    # parts of the total earned by each assistant turn, as returned by the scorer
    turn_rewards: list[float] | None = None
    # parts of the total earned by each token of the response, as returned by the scorer
    token_rewards: list[float] | None = None
    # rewards by token of the response. The rest of the total is placed on the last sampled token
    placed: dict[int, float] = field(default_factory=dict)
    elsewhere: float = 0.0  # share of the total that is placed in other segments of the episode

    @property
    def verdict(self) -> float | None:
        return self.total if self.error is None else None

    @property
    def failed(self) -> bool:
        """True if an attempt at a verdict failed; a function that returned None made none, and another term may have one."""
        return self.error is not None and self.cause != Cause.DECLINED

    @property
    def passes(self) -> bool:
        """True if the response passes: ``acc`` is 1, or without ``acc`` the reward is positive; False without a verdict."""
        return self.error is None and self.terms.get("acc", float(self.quality > 0)) >= 1.0

    @property
    def quality(self) -> float:
        """Reward that the reward function returned."""
        return self.total if self.unshaped is None else self.unshaped
