"""Task with a book that is longer than the context: find the code on one of its pages, which a tool gives one at a time.

    Find the code in the book of 6 pages.  lookup("page 1") -> ... lookup("page 2") -> ... code 47 ...
    (the conversation is replaced by a summary: read 2, code 47)  lookup("page 3") -> ... #### 47

Each row has its pages (``tools_kwargs.lookup.create_kwargs.facts``). Demonstrations are parts of such episodes, each as the policy sees it
between two summaries.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hone.agents.compaction import SUMMARY
from hone.agents.tasks.demonstrations import calls, result, says
from hone.agents.tools.lookup import Lookup
from hone.data.tasks.base import TASKS, Problem, parse_options, require

WORDS = (
    "ash",
    "bay",
    "cliff",
    "dune",
    "elm",
    "fern",
    "glen",
    "hill",
    "isle",
    "jade",
    "kelp",
    "lake",
    "moss",
    "north",
    "oak",
    "pine",
)
INSTRUCTION = "Summarize."
"""Request for a summary in the demonstrations; ``multi_turn.compaction.instruction`` of a run."""


@dataclass(frozen=True)
class BookOptions:
    """Options of the task.

    Attributes:
        pages: pages of a book.
        words: words of a page.
        window: most pages that a demonstration reads before its summary.
        forgets: percent of the summaries in demonstrations that lack the code. A model that imitates them forgets equally often, and a
            reward can teach it what a summary must contain.
        demonstrations: 1 gives each row a demonstration, 0 only the question.
    """

    pages: int = 6
    words: int = 4
    window: int = 3
    forgets: int = 0
    demonstrations: int = 1


class Book:
    """Task of the code in a book; see the module's docstring."""

    data_source = "book"

    def __init__(self, options: BookOptions) -> None:
        def check(condition: bool, problem: str, fix: str) -> None:
            require(condition, problem, task="book", fix=fix)

        check(
            1 <= options.window <= options.pages <= 99,
            f"window={options.window}, pages={options.pages}: not 1 <= window <= pages <= 99",
            "pages=6 window=3",
        )
        check(1 <= options.words <= 200, f"words={options.words} is not in 1..200", "words=4")
        check(0 <= options.forgets <= 100, f"forgets={options.forgets} is not in 0..100 percent", "forgets=60")
        check(
            options.demonstrations in (0, 1),
            f"demonstrations={options.demonstrations} is not 0 or 1",
            "demonstrations=1",
        )
        self.options = options
        self.tools = [Lookup().schema]

    def problems(self, seed: int) -> Iterator[Problem]:
        """Draw problems without end."""
        draw, options = random.Random(seed), self.options
        question = f"Find the code in the book of {options.pages} pages."
        while True:
            code, place = str(draw.randint(10, 99)), draw.randint(1, options.pages)
            pages = [[draw.choice(WORDS) for _ in range(options.words)] for _ in range(options.pages)]
            pages[place - 1].insert(draw.randrange(options.words), f"code {code}")
            texts = [" ".join(words) for words in pages]
            extra = {
                "page": place,
                "tools_kwargs": {
                    "lookup": {"create_kwargs": {"facts": [[f"page {n}", t] for n, t in enumerate(texts, 1)]}}
                },
            }
            note, answer = self._part(draw, code, place, texts) if options.demonstrations else ("", None)
            yield Problem(
                question,
                code,
                None,
                extra,
                prompt=[{"role": "user", "content": question + note}],
                answer=answer,
                tools=self.tools,
                agent_name="tool_agent",
                key=f"{code} {texts}",
            )

    def _part(
        self, draw: random.Random, code: str, place: int, texts: Sequence[str]
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return the summary that a part of an episode begins with, and its turns."""
        window, pages = self.options.window, self.options.pages
        start = draw.randrange(pages + 1)
        stop = min(start + draw.randint(1, window), pages)
        summary = self._summary(draw, start, code if place <= start else None)
        note = f"\n\n{SUMMARY}\n{summary}" if start else ""
        known = code if code in summary or start < place <= stop else None
        turns = []
        for number in range(start, stop):
            key = f"page {number + 1}"
            turns += [calls("lookup", number, key=key), result("lookup", texts[number], number)]
        if stop == pages and (start == pages or draw.random() < 0.5):
            return note, [*turns, says(f"#### {known or draw.randint(10, 99)}")]
        return note, [*turns, {"role": "user", "content": INSTRUCTION}, says(self._summary(draw, stop, known))]

    def _summary(self, draw: random.Random, read: int, code: str | None) -> str:
        """Return a summary; it says nothing of the code in ``forgets`` percent of the cases."""
        if draw.randrange(100) < self.options.forgets:
            return f"read {read}"
        return f"read {read}, " + (f"code {code}" if code else "no code")


@TASKS.register("book")
def make(options: Sequence[str]) -> Book:
    """Build the task from ``key=value`` options."""
    return Book(parse_options(BookOptions, options, task="book"))
