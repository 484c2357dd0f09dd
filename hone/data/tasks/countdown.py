"""Countdown: reach a target with the given numbers, each used once."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from hone.data.tasks.base import TASKS, Problem, TaskMaker


@TASKS.register("countdown")
@dataclass(frozen=True)
class Countdown:
    """``Use 3, 7, 12 with + - * to make 33.`` is answered by ``<answer>7 * 3 + 12</answer>``.

    Attributes:
        count: how many numbers.
        max_number: the largest of them.
        max_target: the largest target; targets are at least 1.
    """

    count: int = 3
    max_number: int = 20
    max_target: int = 100

    def maker(self) -> TaskMaker:
        """The task."""
        return TaskMaker("countdown", self.problem)

    def problem(self, draw: random.Random) -> Problem:
        """Draw numbers and combine them from left to right until the result is a fair target."""
        while True:
            numbers = [draw.randint(1, self.max_number) for _ in range(self.count)]
            value, steps, expression = numbers[0], [], str(numbers[0])
            for number in numbers[1:]:
                sign = draw.choice("+-*")
                result = {"+": value + number, "-": value - number, "*": value * number}[sign]
                steps.append(f"{value} {sign} {number} = {result}")
                expression = (
                    f"({expression}) {sign} {number}"
                    if sign == "*" and len(steps) > 1
                    else f"{expression} {sign} {number}"
                )
                value = result
            if 1 <= value <= self.max_target:
                break
        shown = draw.sample(numbers, len(numbers))
        question = (
            f"Use {', '.join(map(str, shown))} with + - * to make {value}. Give the expression in <answer></answer>."
        )
        solution = "\n".join([*steps, f"<answer>{expression}</answer>"])
        return Problem(question, solution, json.dumps({"target": value, "numbers": shown}))
