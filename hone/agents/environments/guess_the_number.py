"""Guess the number: each wrong guess is answered with "higher" or "lower"."""

from __future__ import annotations

import random
import re

from hone.agents.environments.base import Environment, Step
from hone.agents.messages import AssistantTurn, Message


class GuessTheNumber(Environment):
    """Task of guessing a number from 1 to ``max_number`` with at most ``guesses`` guesses.

        I think of a number from 1 to 16.        8        higher        12        lower        10        right

    The correct guess earns 1, minus ``cost`` for every earlier guess. Facts: ``solved``, ``guesses``.
    """

    def __init__(self, *, max_number: int = 16, guesses: int = 5, cost: float = 0.0) -> None:
        if max_number < 2 or guesses < 1 or not 0 <= cost * guesses <= 1:
            raise ValueError(f"max_number={max_number}, guesses={guesses}, cost={cost}")
        self.max_number, self.guesses, self.cost = max_number, guesses, cost
        self.number, self.guesses_made = 0, 0

    async def reset(self, seed: int) -> list[Message]:
        self.number, self.guesses_made = random.Random(seed).randint(1, self.max_number), 0
        return [{"role": "user", "content": f"I think of a number from 1 to {self.max_number}."}]

    async def step(self, turn: AssistantTurn) -> Step:
        self.guesses_made += 1
        numbers = re.findall(r"\d+", turn.content)
        guess = int(numbers[-1][:9]) if numbers else None
        if guess == self.number:
            return Step(
                reward=1.0 - self.cost * (self.guesses_made - 1),
                done=True,
                facts={"solved": 1.0, "guesses": float(self.guesses_made)},
            )
        facts = {"solved": 0.0, "guesses": float(self.guesses_made)}
        if self.guesses_made == self.guesses:
            return Step(done=True, facts=facts)
        if guess is None or not 1 <= guess <= self.max_number:
            return Step.says(f"say a number from 1 to {self.max_number}", facts=facts)
        return Step.says("higher" if guess < self.number else "lower", facts=facts)
