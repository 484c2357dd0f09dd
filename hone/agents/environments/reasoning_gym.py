"""Adapter for reasoning-gym problems with several tries; a wrong answer is answered with its score."""

from __future__ import annotations

import asyncio
from typing import Any

from hone.agents.environments.base import Environment, Step
from hone.agents.messages import AssistantTurn, Message
from hone.errors import ConfigError
from hone.extras import install_command


class ReasoningGym(Environment):
    """Environment that poses one problem of a reasoning-gym dataset, such as ``basic_arithmetic``, for at most ``tries`` answers."""

    def __init__(self, *, dataset: str, tries: int = 1, config: dict[str, Any] | None = None) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise ConfigError(
                "the environment 'reasoning_gym' needs the package reasoning-gym, which is not installed",
                fix=install_command("tasks"),
            ) from error
        if tries < 1:
            raise ValueError(f"tries={tries}")
        self._make, self.dataset, self.tries, self.config = reasoning_gym.create_dataset, dataset, tries, config or {}
        self.problems: Any = None
        self.entry: dict[str, Any] = {}
        self.tries_made = 0

    async def reset(self, seed: int) -> list[Message]:
        try:
            self.problems = self._make(self.dataset, size=1, seed=seed, **self.config)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"reasoning-gym cannot make '{self.dataset}': {error}", where="extra_info.environment.options"
            ) from error
        self.entry, self.tries_made = self.problems[0], 0
        return [{"role": "user", "content": self.entry["question"]}]

    async def step(self, turn: AssistantTurn) -> Step:
        """Score an answer: the text after the last ``<answer>`` or ``####``, else the whole turn."""
        from hone.data.answers import final_answer

        self.tries_made += 1
        score = float(
            await asyncio.to_thread(self.problems.score_answer, answer=final_answer(turn.content)[0], entry=self.entry)
        )
        facts = {"solved": float(score >= 1.0), "tries": float(self.tries_made)}
        if score >= 1.0 or self.tries_made == self.tries:
            return Step(reward=score, done=True, facts=facts)
        return Step.says(f"That scores {score:g} of 1. Try again.", facts=facts)
