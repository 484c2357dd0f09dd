"""Templated word problems with worked solutions: short enough for a model of a million parameters."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hone.data.tasks.base import TASKS, Problem, TaskMaker

NAMES = ("Ana", "Ben", "Eva", "Leo", "Lily", "Max", "Mia", "Sam", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "marbles", "pens", "shells", "stamps")
GAINS = ("buys", "finds", "gets")
LOSSES = ("loses", "sells", "gives away")


@TASKS.register("arithmetic")
@dataclass(frozen=True)
class Arithmetic:
    """``Tom has 12 apples. Tom finds 7 more. Tom loses 4. How many apples now?``

    The worked solution has one line an operation and ends with ``#### <answer>``; answers are scored by the gsm8k rule.

    Attributes:
        max_number: largest number in the story; totals can be larger.
        operations: gains and losses after the first number.
    """

    max_number: int = 20
    operations: int = 2

    def maker(self) -> TaskMaker:
        """The task."""
        return TaskMaker("arithmetic", self.problem)

    def problem(self, draw: random.Random) -> Problem:
        """Draw one problem."""
        name, thing = draw.choice(NAMES), draw.choice(THINGS)
        total = draw.randint(1, self.max_number)
        story, lines = [f"{name} has {total} {thing}."], []
        for _ in range(self.operations):
            if total < 2 or draw.random() < 0.5:
                amount = draw.randint(1, self.max_number)
                story.append(f"{name} {draw.choice(GAINS)} {amount} more.")
                lines.append(f"{total} + {amount} = {total + amount}")
                total += amount
            else:
                amount = draw.randint(1, min(total, self.max_number))
                story.append(f"{name} {draw.choice(LOSSES)} {amount}.")
                lines.append(f"{total} - {amount} = {total - amount}")
                total -= amount
        question = " ".join([*story, f"How many {thing} now?"])
        return Problem(question, "\n".join([*lines, f"#### {total}"]), str(total))
