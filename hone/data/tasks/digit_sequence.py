"""Answer a short sequence of digits with another one: small enough for RL alone, from random weights.

The reward is graded. With ``g`` the ground truth and ``d`` the digits 0 to 9 of the response in order, all other
characters ignored::

    score = (number of positions i with d[i] == g[i]) / max(len(g), len(d))

Kinds: ``copy`` 3814 -> 3814, ``reverse`` 3814 -> 4183, ``count`` 3814 -> 4925 (each digit plus one; the last digit of the
alphabet wraps around to the first), ``sort`` 3814 -> 1348.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from hone.data.tasks.base import Problem, require, task
from hone.errors import did_you_mean

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
    """The task; see the module's docstring. There are ``digits ** length`` different problems."""

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
