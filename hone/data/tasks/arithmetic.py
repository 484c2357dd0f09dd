"""Word problems of one or more steps, with a worked solution; the answer follows ``####`` as in GSM8K.

    Anna has 7 apples. She buys 12 more. How many apples does Anna have?
    7+12=19
    #### 19

Texts are short and use few words, so that a model of a million parameters can read them; numbers and steps are options. The
defaults give about 1.7 million different problems.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from hone.data.tasks.base import Problem, require, task, wording
from hone.errors import did_you_mean

NAMES = {
    **dict.fromkeys(("Anna", "Mia", "Lucy", "Emma", "Zoe", "Nora", "Ruth", "Ivy"), "She"),
    **dict.fromkeys(("Tom", "Ben", "Sam", "Leo", "Max", "Paul", "Hugo", "Finn"), "He"),
}
OBJECTS = (
    "apples", "books", "coins", "stamps", "cards", "shells", "stones", "cakes",
    "pens", "balls", "eggs", "rings", "plums", "toys", "keys", "cups",
)  # fmt: skip
PHRASINGS = (
    ("{name} has {value} {thing}.", "How many {thing} does {name} have?"),
    ("{name} starts with {value} {thing}.", "With how many {thing} does {name} end?"),
    ("At first {name} has {value} {thing}.", "How many {thing} has {name} got at last?"),
    ("{value} {thing} belong to {name}.", "How many {thing} belong to {name} now?"),
    ("{name} counts {value} {thing}.", "What is the number of {thing} that {name} counts in the end?"),
    ("Here is {name} with {value} {thing}.", "Say how many {thing} {name} is left with."),
)
"""Wordings of the first sentence and of the question."""
VERBS = {
    "+": ("buys {b} more", "finds {b} more", "gets {b} more", "wins {b} more"),
    "-": ("loses {b}", "sells {b}", "gives away {b}", "drops {b}"),
    "*": ("then gets {b} times as many", "then makes it {b} times as many"),
}


@dataclass(frozen=True)
class ArithmeticOptions:
    """Options of the task."""

    max_number: int = 20  # numbers in the text run from 1 to this
    operations: int = 1  # steps of every problem
    operators: str = "+-"  # which of ``+``, ``-`` and ``*`` occur (factors run from 2 to 9, at most max_number)
    min_operations: int = 0  # fewest steps; 0: always ``operations`` steps
    # percentage of the worked solutions with a child's mistake in their last step: counting on from the first
    # number as if it were the second, one too few for ``+`` and ``*``, one too many for ``-``. The ground truth
    # stays right. Imitation then learns the mistake too, and a reward can correct it
    slips: int = 0
    phrasings: int = 1  # wordings of the question that occur, 1 to 6; the numbers stay those of one wording


@task("arithmetic", ArithmeticOptions)
class Arithmetic:
    data_source = "arithmetic"

    def __init__(self, options: ArithmeticOptions) -> None:
        check = partial(require, "arithmetic")
        check(
            2 <= options.max_number <= 10**6, f"max_number={options.max_number} is not in 2..1000000", "max_number=20"
        )
        check(1 <= options.operations <= 8, f"operations={options.operations} is not in 1..8", "operations=2")
        check(
            0 <= options.min_operations <= options.operations,
            f"min_operations={options.min_operations} is not in 0..{options.operations}",
            f"min_operations={options.operations}",
        )
        check(
            bool(options.operators) and set(options.operators) <= set(VERBS),
            f"operators={options.operators} must be some of {''.join(VERBS)}",
            "operators=+-",
        )
        check(0 <= options.slips <= 100, f"slips={options.slips} is not in 0..100 percent", "slips=60")
        most = len(PHRASINGS)
        check(1 <= options.phrasings <= most, f"phrasings={options.phrasings} is not in 1..{most}", f"phrasings={most}")
        self.options = options

    def problems(self, seed: int) -> Iterator[Problem]:
        generator = random.Random(seed)
        while True:
            yield self._draw(generator)

    def _draw(self, generator: random.Random) -> Problem:
        options = self.options
        name, thing = generator.choice(tuple(NAMES)), generator.choice(OBJECTS)
        steps = generator.randint(options.min_operations or options.operations, options.operations)
        operators = [generator.choice(options.operators) for _ in range(steps)]
        value = generator.randint(1, options.max_number)
        first, sentences, lines = value, [], []
        for operator in operators:
            if operator == "-" and value == 0:
                operator = "+"  # nothing is left to subtract
            number = self._operand(generator, operator, value)
            result = {"+": value + number, "-": value - number, "*": value * number}[operator]
            sentences.append(f"{NAMES[name]} {generator.choice(VERBS[operator]).format(b=number)}.")
            lines.append(f"{value}{operator}{number}={result}")
            value = result
        facts = " ".join([name, str(first), thing, *sentences])
        phrasing = wording(options.phrasings, facts)
        opening, last = (
            text.format(name=name, value=first, thing=thing) for text in PHRASINGS[phrasing.get("phrasing", 0)]
        )
        slip = options.slips > 0 and generator.randrange(100) < options.slips
        sum_line = lines[-1].partition("=")[0]
        shown = value + (1 if "-" in sum_line else -1) * slip
        lines[-1] = f"{sum_line}={shown}"
        return Problem(
            " ".join([opening, *sentences, last]),
            str(value),
            "\n".join([*lines, f"#### {shown}"]),
            {"operations": steps, "slip": slip, **phrasing},
        )

    def _operand(self, generator: random.Random, operator: str, value: int) -> int:
        low, high = {
            "+": (1, self.options.max_number),
            "-": (1, min(value, self.options.max_number)),
            "*": (2, min(9, self.options.max_number)),
        }[operator]
        return generator.randint(low, high)


KINDS: dict[str, Callable[[list[int], int], list[int]]] = {
    "copy": lambda row, _: row,
    "reverse": lambda row, _: row[::-1],
    "count": lambda row, digits: [(digit + 1) % digits for digit in row],
    "sort": lambda row, _: sorted(row),
}


@dataclass(frozen=True)
class DigitSequenceOptions:
    """Options of the task."""

    kind: str = "copy"  # ``copy``, ``reverse``, ``count`` or ``sort``
    length: int = 4  # digits in the prompt and in the answer
    digits: int = 10  # size of the alphabet, 2 to 10 (2 means the digits 0 and 1)


@task("digit_sequence", DigitSequenceOptions)
class DigitSequence:
    """Answer a sequence of digits with another one: small enough for RL alone, from random weights.

    ``copy`` 3814 -> 3814, ``reverse`` 3814 -> 4183, ``count`` 3814 -> 4925 (each digit plus one; the last of the alphabet wraps around),
    ``sort`` 3814 -> 1348. The reward is the share of right positions, and other characters are ignored. There are
    ``digits ** length`` different problems.
    """

    data_source = "digit_sequence"

    def __init__(self, options: DigitSequenceOptions) -> None:
        check = partial(require, "digit_sequence")
        check(options.kind in KINDS, f"unknown kind '{options.kind}'", did_you_mean(options.kind, KINDS))
        check(1 <= options.length <= 64, f"length={options.length} is not in 1..64", "length=4")
        check(2 <= options.digits <= 10, f"digits={options.digits} is not in 2..10", "digits=10")
        self.options = options

    def problems(self, seed: int) -> Iterator[Problem]:
        generator, options = random.Random(seed), self.options
        while True:
            row = [generator.randrange(options.digits) for _ in range(options.length)]
            answer = "".join(map(str, KINDS[options.kind](row, options.digits)))
            yield Problem(f"{options.kind} {''.join(map(str, row))}", answer, answer, {"kind": options.kind})


@dataclass(frozen=True)
class CountdownOptions:
    """Options of the task."""

    min_numbers: int = 3  # fewest numbers in a problem
    max_numbers: int = 4  # most numbers in a problem
    max_number: int = 20  # numbers run from 1 to this
    max_target: int = 100  # targets, and all intermediate values, run from 1 to this


@task("countdown", CountdownOptions)
class Countdown:
    """Combine all given numbers, each once, into a target with ``+ - * /``; any right expression counts.

    The answer is in ``<answer></answer>``. The ground truth is JSON: ``{"target": 22, "numbers": [3, 5, 7]}``.
    """

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
