"""Arithmetic task that needs a calculator, with demonstrations of its use.

What is 34*27+51?      -> calculator(expression="34*27+51") -> 969 -> #### 969
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from hone.agents.tasks.demonstrations import calls, result, says
from hone.agents.tools.calculator import Calculator, calculate
from hone.data.tasks.base import Problem, require, task, wording

PHRASINGS = (
    "What is {}?", "Compute {}.", "How much is {}?", "Work out {}.", "Give the value of {}.", "Which number is {}?",
)  # fmt: skip


@dataclass(frozen=True)
class CalculatorOptions:
    """Options of the task."""

    min_number: int = 2  # smallest number
    max_number: int = 99  # largest number
    operations: int = 1  # operators of every problem
    operators: str = "+-*"  # which of ``+``, ``-`` and ``*`` occur
    # percent of the demonstrations that do not use the tool and guess a random number of the answer's length. A model
    # that imitates them guesses equally often, and a reward can teach it to call the tool.
    guesses: int = 0
    phrasings: int = 1  # wordings of the question that occur, 1 to 6; the expressions stay those of one wording


@task("calculator", CalculatorOptions)
class CalculatorTask:
    """Arithmetic task; see the module's docstring."""

    data_source = "calculator"

    def __init__(self, options: CalculatorOptions) -> None:
        check = partial(require, "calculator")
        check(
            3 <= options.max_number <= 10**6, f"max_number={options.max_number} is not in 3..1000000", "max_number=99"
        )
        check(
            0 <= options.min_number < options.max_number,
            f"min_number={options.min_number} is not in 0..{options.max_number - 1}, below max_number",
            "min_number=2",
        )
        check(1 <= options.operations <= 8, f"operations={options.operations} is not in 1..8", "operations=1")
        check(
            bool(options.operators) and set(options.operators) <= set("+-*"),
            f"operators={options.operators} must be a non-empty selection of +-*",
            "operators=+*",
        )
        check(0 <= options.guesses <= 100, f"guesses={options.guesses} is not in 0..100 percent", "guesses=75")
        most = len(PHRASINGS)
        check(1 <= options.phrasings <= most, f"phrasings={options.phrasings} is not in 1..{most}", f"phrasings={most}")
        self.options = options
        self.tools = [Calculator().schema]

    def problems(self, seed: int) -> Iterator[Problem]:
        draw, options = random.Random(seed), self.options
        while True:
            expression = str(draw.randint(options.min_number, options.max_number))
            for _ in range(options.operations):
                expression += f"{draw.choice(options.operators)}{draw.randint(options.min_number, options.max_number)}"
            value = calculate(expression)
            guess = draw.randrange(100) < options.guesses
            phrasing = wording(options.phrasings, expression)
            yield Problem(
                PHRASINGS[phrasing.get("phrasing", 0)].format(expression),
                value,
                f"#### {value}",
                {"expression": expression, "guessed": guess, **phrasing},
                answer=self._guess(draw, expression, value) if guess else self._demonstration(expression, value),
                tools=self.tools,
                agent_name="tool_agent",
            )

    def _demonstration(self, expression: str, value: str) -> list[dict]:
        return [calls("calculator", expression=expression), result("calculator", value), says(f"#### {value}")]

    def _guess(self, draw: random.Random, expression: str, value: str) -> list[dict]:
        digits = len(value.lstrip("-"))
        number = draw.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)
        return [says(f"{expression} #### {'-' if value.startswith('-') else ''}{number}")]
