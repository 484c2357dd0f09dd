"""Task with questions that need several look-ups: each answer is the key of the next look-up.

    Where does the boss of the boss of Ann live?
    lookup("boss of Ann") -> Tom -> lookup("boss of Tom") -> Eva -> lookup("home of Eva") -> Oslo -> #### Oslo

Each row has a table of facts (``tools_kwargs.lookup.create_kwargs.facts``), irrelevant facts included.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from hone.agents.tasks.demonstrations import calls, result, says
from hone.agents.tools.lookup import Lookup
from hone.data.tasks.base import Problem, require, task

NAMES = ("Ann", "Tom", "Eva", "Ben", "Zoe", "Max", "Ida", "Leo", "Mia", "Sam", "Liv", "Tim", "Una", "Kai", "Pia", "Rex")
TOWNS = ("Oslo", "Rome", "Lima", "Cairo", "Paris", "Quito", "Delhi", "Seoul")


@dataclass(frozen=True)
class MultiHopOptions:
    """Options of the task."""

    hops: int = 2  # look-ups that the answer needs
    people: int = 6  # people per table, at least ``hops``
    # percent of the demonstrations that repeat the name and guess a town. A model that imitates them guesses equally
    # often, and a reward can teach it to call the tool.
    guesses: int = 0


@task("multi_hop", MultiHopOptions)
class MultiHop:
    """Multi-hop task; see the module's docstring."""

    data_source = "multi_hop"

    def __init__(self, options: MultiHopOptions) -> None:
        check = partial(require, "multi_hop")
        check(
            1 <= options.hops <= options.people <= len(NAMES),
            f"hops={options.hops}, people={options.people}: not 1 <= hops <= people <= {len(NAMES)}",
            "hops=2 people=6",
        )
        check(0 <= options.guesses <= 100, f"guesses={options.guesses} is not in 0..100 percent", "guesses=75")
        self.options = options
        self.tools = [Lookup().schema]

    def problems(self, seed: int) -> Iterator[Problem]:
        draw, options = random.Random(seed), self.options
        while True:
            people = draw.sample(NAMES, options.people)
            facts: dict[str, str] = {}
            for place, name in enumerate(people):
                facts[f"boss of {name}"] = people[(place + 1) % len(people)]
                facts[f"home of {name}"] = draw.choice(TOWNS)
            steps, name = [], people[0]
            for _ in range(options.hops - 1):
                steps.append((f"boss of {name}", facts[f"boss of {name}"]))
                name = steps[-1][1]
            steps.append((f"home of {name}", facts[f"home of {name}"]))
            table = sorted(facts.items(), key=lambda _: draw.random())
            chain = "the boss of " * (options.hops - 1) + people[0]
            answer = [
                message
                for number, (key, value) in enumerate(steps)
                for message in (calls("lookup", number, key=key), result("lookup", value, number))
            ]
            final = f"#### {steps[-1][1]}"
            guess = draw.randrange(100) < options.guesses if options.guesses else False
            if guess:
                answer = [says(f"{people[0]} #### {draw.choice(TOWNS)}")]
            yield Problem(
                f"Where does {chain} live?",
                steps[-1][1],
                final,
                {
                    "guessed": guess,
                    "tools_kwargs": {"lookup": {"create_kwargs": {"facts": [list(fact) for fact in table]}}},
                },
                answer=answer if guess else [*answer, says(final)],
                tools=self.tools,
                agent_name="tool_agent",
                key=f"{chain}: {sorted(facts.items())}",
            )
