"""Short Python functions to write, checked by calling them in the sandbox.

    Write f(x): add 3, then multiply by 2.
    ```python
    def f(x):
        return (x + 3) * 2
    ```

The ground truth has inputs and outputs, as in published problems: ``{"fn_name": "f", "inputs": [[4]], "outputs": [14]}``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hone.data.tasks.base import Problem, require, task

Steps = Sequence[tuple[str, int]]  # operators and numbers, in order of execution

_WORDS = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}"}


@dataclass(frozen=True)
class ProgramsOptions:
    """Options of the task."""

    steps: int = 2  # number of operations on the argument; additions and multiplications alternate
    max_number: int = 9  # numbers run from 2 to this
    tests: int = 3  # number of calls that check a program
    # percentage of the demonstrations that execute the steps in the wrong order. Tests and ``extra_info.answer``
    # stay right. Imitation then learns the mistake too, and a reward can correct it
    slips: int = 0


@task("programs", ProgramsOptions)
class Programs:
    data_source = "code"

    def __init__(self, options: ProgramsOptions) -> None:
        check = partial(require, "programs")
        check(2 <= options.steps <= 6, f"steps={options.steps} is not in 2..6", "steps=2")
        check(2 <= options.max_number <= 999, f"max_number={options.max_number} is not in 2..999", "max_number=9")
        check(1 <= options.tests <= 20, f"tests={options.tests} is not in 1..20", "tests=3")
        check(0 <= options.slips <= 100, f"slips={options.slips} is not in 0..100 percent", "slips=60")
        self.options = options

    def problems(self, seed: int) -> Iterator[Problem]:
        draw, options = random.Random(seed), self.options
        while True:
            sums = draw.random() < 0.5
            steps = [
                (draw.choice("+-") if (place % 2 == 0) == sums else "*", draw.randint(2, options.max_number))
                for place in range(options.steps)
            ]
            inputs = draw.sample(range(-20, 100), options.tests)
            slip = draw.randrange(100) < options.slips and steps != steps[::-1]
            words = ", then ".join(_WORDS[operator].format(number) for operator, number in steps)
            yield Problem(
                f"Write f(x): {words}.",
                json.dumps(
                    {"fn_name": "f", "inputs": [[x] for x in inputs], "outputs": [result(steps, x) for x in inputs]}
                ),
                program(steps),
                {"slip": slip},
                answer=[{"role": "assistant", "content": program(steps[::-1])}] if slip else None,
            )


def program(steps: Steps) -> str:
    """Return a block of Python with a function ``f`` that executes the steps."""
    expression = "x"
    for place, (operator, number) in enumerate(steps):
        inner = f"({expression})" if place and operator == "*" else expression
        expression = f"{inner} {operator} {number}"
    return f"```python\ndef f(x):\n    return {expression}\n```"


def result(steps: Steps, x: int) -> int:
    for operator, number in steps:
        x = {"+": x + number, "-": x - number, "*": x * number}[operator]
    return x
