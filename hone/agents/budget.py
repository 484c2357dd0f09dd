"""Limits of an episode: turns, tokens, tool calls and time. Each limit ends the episode with a distinct reason."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hone.data.episode_log import EpisodeEnd


class BudgetSpent(Exception):  # noqa: N818 - a signal that ends an episode, not an error
    """Signal that the episode has reached a limit."""

    def __init__(self, end: EpisodeEnd) -> None:
        super().__init__(end.value)
        self.end = end  # the limit that was reached


@dataclass(frozen=True)
class Limits:
    """Limits of one episode; None means unlimited."""

    tokens: int  # all tokens after the prompt, sampled or not
    assistant_turns: int | None = None  # turns of the policy
    user_turns: int | None = None  # turns of a simulated user or an environment
    tool_calls: int | None = None  # executed tool calls
    seconds: float | None = None  # wall time
    context: int | None = None  # tokens that the engine can hold, prompt included


class Budget:
    """Consumption of one episode measured against its limits."""

    def __init__(self, limits: Limits, started: float) -> None:
        self.limits, self._started = limits, started

    def check_time(self) -> None:
        """Raise :class:`BudgetSpent` when the time is over."""
        if self.limits.seconds is not None and self.seconds_left <= 0:
            raise BudgetSpent(EpisodeEnd.TIME)

    @property
    def seconds_left(self) -> float:
        """Remaining wall time in seconds; infinite without a limit."""
        if self.limits.seconds is None:
            return float("inf")
        return self.limits.seconds - (time.perf_counter() - self._started)

    def check_turn(self, assistant_turns: int, tokens_left: int) -> None:
        """Raise :class:`BudgetSpent` when the policy has no turn left, or no token of the episode's limit."""
        self.check_time()
        if self.limits.assistant_turns is not None and assistant_turns >= self.limits.assistant_turns:
            raise BudgetSpent(EpisodeEnd.ASSISTANT_TURNS)
        if tokens_left <= 0:
            raise BudgetSpent(EpisodeEnd.TOKENS)

    def check_user_turn(self, user_turns: int) -> None:
        """Raise :class:`BudgetSpent` when the user, or the environment, has no turn left."""
        if self.limits.user_turns is not None and user_turns >= self.limits.user_turns:
            raise BudgetSpent(EpisodeEnd.USER_TURNS)
