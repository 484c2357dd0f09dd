"""Repeat a short sequence of digits: the smallest task on which a policy can be seen to learn."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hone.data.tasks.base import TASKS, Problem, TaskMaker


@TASKS.register("digit_sequence")
@dataclass(frozen=True)
class DigitSequence:
    """``3 1 4`` is answered by ``3 1 4``.

    The score is graded: the share of positions at which the digits of the answer are those asked for, over the longer of
    the two. So a model with random weights begins above zero and every step towards the task pays.

    Attributes:
        length: digits in the sequence.
        base: digits are 0 to base - 1.
    """

    length: int = 3
    base: int = 10

    def maker(self) -> TaskMaker:
        """The task."""
        return TaskMaker("digit_sequence", self.problem)

    def problem(self, draw: random.Random) -> Problem:
        """Draw one problem."""
        digits = " ".join(str(draw.randrange(self.base)) for _ in range(self.length))
        return Problem(digits, digits, digits.replace(" ", ""))
