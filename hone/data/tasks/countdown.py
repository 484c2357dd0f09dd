"""Countdown: combine all given numbers, each exactly once, into a target.

The ground truth is the JSON text ``{"target": 22, "numbers": [3, 5, 7]}``. Any expression over exactly these numbers with
``+ - * /`` and parentheses and the target as its value is right. The answer is in ``<answer></answer>``::

    Use 7, 3 and 5, each once, with + - * / to make 22. Write the expression in <answer></answer>.
    3*5=15
    15+7=22
    <answer>(3*5)+7</answer>
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from hone.data.tasks.base import Problem, require, task


@dataclass(frozen=True)
class CountdownOptions:
    """Options of the task."""

    min_numbers: int = 3  # fewest numbers in a problem
    max_numbers: int = 4  # most numbers in a problem
    max_number: int = 20  # numbers run from 1 to this
    max_target: int = 100  # targets, and all intermediate values, run from 1 to this


@task("countdown", CountdownOptions)
class Countdown:
    data_source = "countdown"

    def __init__(self, options: CountdownOptions) -> None:
        check = partial(require, "countdown")
        low, high = options.min_numbers, options.max_numbers
        check(
            2 <= low <= high <= 8, f"min_numbers={low}, max_numbers={high}: not 2 <= min <= max <= 8", "max_numbers=4"
        )
        check(options.max_number >= 2, f"max_number={options.max_number} is below 2", "max_number=20")
        check(
            options.max_target >= options.max_number,
            f"max_target={options.max_target} is below max_number={options.max_number}",
            f"max_target={options.max_number}",
        )
        self.options = options

    def problems(self, seed: int) -> Iterator[Problem]:
        generator, options = random.Random(seed), self.options
        while True:
            count = generator.randint(options.min_numbers, options.max_numbers)
            numbers = [generator.randint(1, options.max_number) for _ in range(count)]
            lines, expression, target = self._combine(generator, numbers)
            shown = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
            yield Problem(
                f"Use {shown}, each once, with + - * / to make {target}. Write the expression in <answer></answer>.",
                json.dumps({"target": target, "numbers": numbers}),
                "\n".join([*lines, f"<answer>{expression}</answer>"]),
                {"numbers": numbers, "target": target},
            )

    def _combine(self, generator: random.Random, numbers: list[int]) -> tuple[list[str], str, int]:
        """Join random pairs until one value is left; every intermediate value is whole and in 1..max_target."""
        parts = [(number, str(number)) for number in numbers]
        lines = []
        while len(parts) > 1:
            generator.shuffle(parts)
            (a, left), (b, right) = sorted(parts[-2:], key=lambda part: -part[0])
            choices = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if a % b == 0 else 0}
            allowed = [sign for sign, value in choices.items() if 1 <= value <= self.options.max_target]
            if not allowed:  # two equal or large numbers whose sum is too large and whose difference is 0
                return self._combine(generator, numbers)
            sign = generator.choice(allowed)
            lines.append(f"{a}{sign}{b}={choices[sign]}")
            parts[-2:] = [(choices[sign], f"({left}{sign}{right})")]
        return lines, parts[0][1][1:-1], parts[0][0]
