"""Task with questions whose answers are in documents, for the tool ``search``.

    What is the town of Vera Holm?
    search("the town of Vera Holm") -> [1] Vera Holm: trade baker, town Oslo, colour green.
    Found: town Oslo. <answer> Oslo </answer>

The documents, one per person, are invented and the same for every seed. They are written to the problems' folder as
``documents.jsonl``, the value of the tool's ``files``. No question of the validation file is in the training file, so its answer
must be searched.

Names and facts follow a space in question, query, document and answer, so that a byte-level tokenizer has the same token for each
everywhere. An answer first quotes the document, kind and fact together. Both help small models, which copy what follows a token that
they have seen before.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from hone.agents.tasks.demonstrations import calls, result, says
from hone.agents.tools.lookup import Lookup
from hone.agents.tools.search import SCHEMA, Index
from hone.data.seeding import derive_seed
from hone.data.tasks.base import Problem, require, task

FIRST = (
    "Vera", "Olaf", "Nina", "Hugo", "Ruth", "Igor", "Jana", "Karl", "Lena", "Emil", "Rosa", "Axel",
    "Maja", "Otto", "Paul", "Elsa", "Finn", "Greta", "Ivan", "Dora",
)  # fmt: skip
LAST = (
    "Holm", "Lund", "Berg", "Falk", "Stone", "Marsh", "Reed", "Frost", "Hale", "Vance", "Wolf", "Crane",
    "Dahl", "Flint", "Moss", "Pike", "Rowe", "Thorn", "Voss", "West",
)  # fmt: skip
FACTS = {
    "trade": ("baker", "nurse", "pilot", "judge", "tailor", "painter", "farmer", "singer", "miner", "clerk"),
    "town": ("Oslo", "Rome", "Lima", "Cairo", "Paris", "Quito", "Delhi", "Seoul", "Tunis", "Perth", "Turin", "Dakar"),
    "colour": ("green", "blue", "red", "white", "black", "brown", "grey", "pink", "yellow", "purple"),
}
"""Possible values of each kind of fact."""


@dataclass(frozen=True)
class SearchQAOptions:
    """Options of the task."""

    people: int = 400  # number of documents, at most 400
    k: int = 1  # documents per query in the demonstrations, the tool's setting ``k``
    # percent of the demonstrations that guess without the tool. A model that imitates them guesses equally often, and a
    # reward can teach it to search.
    guesses: int = 0


@task("search_qa", SearchQAOptions)
class SearchQA:
    """Search task; see the module's docstring."""

    data_source = "search_em"

    def __init__(self, options: SearchQAOptions) -> None:
        check = partial(require, "search_qa")
        max_people = len(FIRST) * len(LAST)
        check(2 <= options.people <= max_people, f"people={options.people} is not in 2..{max_people}", "people=400")
        check(1 <= options.k <= options.people, f"k={options.k} is not in 1..people={options.people}", "k=1")
        check(0 <= options.guesses <= 100, f"guesses={options.guesses} is not in 0..100 percent", "guesses=75")
        self.options, self.tools = options, [SCHEMA]
        draw = random.Random(derive_seed(0, "search_qa"))
        names = [f"{first} {last}" for first, last in itertools.product(FIRST, LAST)]
        self._people = {
            name: {fact: draw.choice(values) for fact, values in FACTS.items()}
            for name in draw.sample(names, options.people)
        }

    def files(self) -> dict[str, list[dict[str, Any]]]:
        """Return the documents, the rows of ``documents.jsonl``."""
        return {
            "documents.jsonl": [
                {"title": name, "text": ", ".join(f"{fact} {value}" for fact, value in facts.items()) + "."}
                for name, facts in self._people.items()
            ]
        }

    @cached_property
    def _index(self) -> Index:
        documents = [f"{row['title']}: {row['text']}" for row in self.files()["documents.jsonl"]]
        return Index(documents, k=self.options.k)

    def problems(self, seed: int) -> Iterator[Problem]:
        draw, names = random.Random(seed), list(self._people)
        while True:
            name, fact = draw.choice(names), draw.choice(list(FACTS))
            answer, query = self._people[name][fact], f"the {fact} of {name}"
            guess = draw.randrange(100) < self.options.guesses
            searched = [
                calls("search", query=query),
                result("search", self._index.find(query)),
                says(_answered("Found", fact, answer)),
            ]
            guessed = [says(_answered("Perhaps", fact, draw.choice(FACTS[fact])))]
            yield Problem(
                f"What is the {fact} of {name}?",
                answer,
                _answered("Found", fact, answer),
                {"guessed": guess},
                answer=guessed if guess else searched,
                tools=self.tools,
                agent_name="tool_agent",
            )


def _answered(opening: str, fact: str, answer: str) -> str:
    """Return the fact, and the answer in the form of Search-R1."""
    return f"{opening}: {fact} {answer}. <answer> {answer} </answer>"


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
    """Questions of several look-ups, in which each answer is the key of the next.

    Where does the boss of the boss of Ann live?
    lookup("boss of Ann") -> Tom -> lookup("boss of Tom") -> Eva -> lookup("home of Eva") -> Oslo -> #### Oslo

    Each row has a table of facts (``tools_kwargs.lookup.create_kwargs.facts``), irrelevant ones included.
    """

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
