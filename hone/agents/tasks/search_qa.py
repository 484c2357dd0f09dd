"""Questions whose answers stand in documents, to be found with the tool ``search``.

    What is the price of part 427?
    search("427") -> [1] part 427: weight 38, price 52, shelf 17. -> <answer>52</answer>

The documents, one a part of a catalogue, are invented and the same for every seed. They are written beside the problems, as
``documents.jsonl``, which the tool's ``files`` names. No question of the validation file stands in the training file, so its answer has
to be looked up. All that has to be copied are digits, which a tokenizer of single digits writes alike wherever they stand: a model of half a
million parameters learns to copy them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hone.agents.tasks.demonstrations import calls, result, says
from hone.agents.tools.search import SCHEMA, Index
from hone.data.seeding import derive_seed
from hone.data.tasks.base import TASKS, Problem, parse_options, require

FACTS = ("weight", "price", "shelf")
_NUMBERS, _VALUES = range(100, 1000), range(10, 100)


@dataclass(frozen=True)
class SearchQAOptions:
    """Options of the task.

    Attributes:
        parts: documents, one a part.
        k: documents that the demonstrations see for a query, as the tool's setting ``k`` has it.
        guesses: percent of the demonstrations that do without the tool: they repeat the part's number and guess. Imitation then learns to guess as
            often, and a reward can teach it to search.
    """

    parts: int = 500
    k: int = 1
    guesses: int = 0


class SearchQA:
    """The task; see the module's docstring."""

    data_source = "search_em"

    def __init__(self, options: SearchQAOptions) -> None:
        def check(condition: bool, what: str, fix: str) -> None:
            require(condition, what, task="search_qa", fix=fix)

        most = len(_NUMBERS)
        check(2 <= options.parts <= most, f"parts={options.parts} is not in 2..{most}", "parts=500")
        check(1 <= options.k <= options.parts, f"k={options.k} is not in 1..parts={options.parts}", "k=1")
        check(0 <= options.guesses <= 100, f"guesses={options.guesses} is not in 0..100 percent", "guesses=75")
        self.options, self.tools = options, [SCHEMA]
        draw = random.Random(derive_seed(0, "search_qa"))
        self._parts = {
            str(number): {fact: str(draw.choice(_VALUES)) for fact in FACTS}
            for number in draw.sample(_NUMBERS, options.parts)
        }

    def files(self) -> dict[str, list[dict[str, Any]]]:
        """The documents, for ``documents.jsonl``."""
        return {
            "documents.jsonl": [
                {"title": f"part {number}", "text": ", ".join(f"{fact} {value}" for fact, value in facts.items()) + "."}
                for number, facts in self._parts.items()
            ]
        }

    @cached_property
    def _index(self) -> Index:
        documents = [f"{row['title']}: {row['text']}" for row in self.files()["documents.jsonl"]]
        return Index(documents, k=self.options.k)

    def problems(self, seed: int) -> Iterator[Problem]:
        """Endless draws."""
        draw, numbers = random.Random(seed), list(self._parts)
        while True:
            number, fact = draw.choice(numbers), draw.choice(FACTS)
            answer = self._parts[number][fact]
            guess = draw.randrange(100) < self.options.guesses
            said = f"{number} <answer>{draw.choice(_VALUES)}</answer>" if guess else f"<answer>{answer}</answer>"
            searched = [] if guess else [calls("search", query=number), result("search", self._index.find(number))]
            yield Problem(
                f"What is the {fact} of part {number}?",
                answer,
                f"<answer>{answer}</answer>",
                {"guessed": guess},
                answer=[*searched, says(said)],
                tools=self.tools,
                agent_name="tool_agent",
            )


@TASKS.register("search_qa")
def make(options: Sequence[str]) -> SearchQA:
    """Build the task from ``key=value`` options."""
    return SearchQA(parse_options(SearchQAOptions, options, task="search_qa"))
