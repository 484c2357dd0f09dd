"""Base class of environments in which the policy writes problems for itself, and sums, which are such problems.

The loop ``environment`` lets the policy solve problems drawn from seeds, the same for every policy. The loop ``proposer_solver`` lets it
write a problem first, which several attempts then solve.
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Sequence

from hone.agents.environments.base import Environment, Step
from hone.agents.messages import AssistantTurn, Message
from hone.agents.tools.base import ToolError
from hone.agents.tools.calculator import calculate


class Proposals(Environment):
    """Environment that asks for a problem, checks it, and scores answers to it.

    An option of every such environment: ``attempts`` is the number of solvers of a proposed problem.
    """

    def __init__(self, *, attempts: int = 4) -> None:
        if attempts < 2:
            raise ValueError(f"attempts={attempts}: solvers of a problem are compared with each other, which takes two")
        self.attempts = attempts

    @abstractmethod
    async def ask(self, seed: int) -> str:
        """Return the proposer's prompt, which depends only on ``seed`` and the options."""

    @abstractmethod
    async def pose(self, proposal: str) -> str | None:
        """Return the solver's prompt for the problem in the proposer's turn; None for an invalid one."""

    @abstractmethod
    async def check(self, answer: str) -> float:
        """Return the reward, 0 to 1, of a solver's turn for the problem that was posed."""

    @abstractmethod
    def proposal(self, seed: int) -> str:
        """Return a valid proposal for the prompt of ``seed``, drawn from it."""

    @property
    @abstractmethod
    def answer(self) -> str:
        """A right answer to the problem that was posed."""

    def worth(self, scores: Sequence[float]) -> float:
        """Return the proposer's reward from those of the solvers: 1 if half of them are right, 0 if all or none are.

        Source: Huang et al. 2025 (R-Zero), arXiv:2508.05004, the uncertainty reward ``1 - 2 |p - 1/2|``.
        """
        return 1 - 2 * abs(sum(scores) / len(scores) - 0.5)

    async def reset(self, seed: int) -> list[Message]:
        """Pose the problem drawn from the seed."""
        await self.ask(seed)
        problem = await self.pose(self.proposal(seed))
        assert problem is not None, "a drawn proposal is valid"
        return [{"role": "user", "content": problem}]

    async def step(self, turn: AssistantTurn) -> Step:
        score = await self.check(turn.content)
        return Step(reward=score, done=True, facts={"solved": score})


class Sums(Proposals):
    """Sums of whole numbers, one of which is given: ``4 + 17 - 9``; parentheses and other operators are invalid.

    Options: ``max_number`` is the largest number (99), ``terms`` the largest count of them (3). The last number of an answer counts.
    """

    def __init__(self, *, attempts: int = 4, max_number: int = 99, terms: int = 3) -> None:
        super().__init__(attempts=attempts)
        if max_number < 1 or terms < 2:
            raise ValueError(f"max_number={max_number} is below 1, or terms={terms} below 2")
        self.max_number, self.terms = max_number, terms
        self._given, self._answer = 0, ""

    async def ask(self, seed: int) -> str:
        self._given = random.Random(seed).randint(1, self.max_number)
        count = "2" if self.terms == 2 else f"2 to {self.terms}"
        return f"Write a sum of {count} numbers up to {self.max_number}, one of them {self._given}."

    async def pose(self, proposal: str) -> str | None:
        written = re.search(r"\b[0-9]{1,9}(?:\s?[+-]\s?[0-9]{1,9})+", proposal)
        numbers = [int(number) for number in re.findall("[0-9]+", written[0])] if written else []
        if not written or not 2 <= len(numbers) <= self.terms or self._given not in numbers:
            return None
        if max(numbers) > self.max_number:
            return None
        text = re.sub(r"\s?([+-])\s?", r" \1 ", written[0])
        try:
            self._answer = calculate(text)
        except ToolError:  # a number that begins with 0
            return None
        return f"{text} = ?"

    async def check(self, answer: str) -> float:
        numbers = re.findall("-?[0-9]+", answer)
        return float(numbers[-1:] == [self._answer])

    def proposal(self, seed: int) -> str:
        draw = random.Random(f"proposal/{seed}")
        numbers = [draw.randint(1, self.max_number) for _ in range(draw.randint(1, self.terms - 1))]
        numbers.insert(draw.randint(0, len(numbers)), random.Random(seed).randint(1, self.max_number))
        return "".join(f" {draw.choice('+-')} {number}" for number in numbers)[3:]

    @property
    def answer(self) -> str:
        return self._answer
