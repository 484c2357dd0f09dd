"""Task with a book that is longer than the context: read it to its end, one page at a time.

    Read the book of 6 pages.  lookup("page 1") -> ... lookup("page 2") -> ... lookup("page 3") -> ...
    (the conversation is replaced by a summary: read 3)  lookup("page 4") -> ... lookup("page 6") -> ... #### done

Each row has its pages (``tools_kwargs.lookup.create_kwargs.facts``). Demonstrations are parts of such episodes, each as the policy sees it
between two summaries. The reward of `examples/long_book` looks at the calls of the episode.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hone.agents.tasks.demonstrations import calls, result, says
from hone.agents.tool_agent import SUMMARY
from hone.agents.tools.lookup import Lookup
from hone.data.tasks.base import Problem, require, task

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
    "oak",
    "pine",
    "reed",
)
INSTRUCTION = "Summarize."
"""Request for a summary in the demonstrations; ``multi_turn.compaction.instruction`` of a run."""
DONE = "done"


@dataclass(frozen=True)
class BookOptions:
    """Options of the task."""

    pages: int = 6
    words: int = 8
    window: int = 3  # most pages that a demonstration reads before its summary
    # percent of the summaries in demonstrations that do not say how far the book is read, so that the next part begins
    # it again. A model that imitates them forgets equally often, and a reward can teach it what a summary must contain.
    forgets: int = 0
    # ``parts`` gives each row a part of an episode, as the policy sees it between two summaries; ``whole`` the episode
    # of a reader whose context holds the book, with which a reward can be tried
    demonstrations: str = "parts"


@task("book", BookOptions)
class Book:
    """Task of a book; see the module's docstring."""

    data_source = "book"

    def __init__(self, options: BookOptions) -> None:
        check = partial(require, "book")
        sizes = f"window={options.window}, pages={options.pages}: not 1 <= window <= pages <= 99"
        check(1 <= options.window <= options.pages <= 99, sizes, "pages=6 window=3")
        check(1 <= options.words <= 200, f"words={options.words} is not in 1..200", "words=8")
        check(0 <= options.forgets <= 100, f"forgets={options.forgets} is not in 0..100 percent", "forgets=50")
        check(
            options.demonstrations in ("parts", "whole"),
            f"demonstrations={options.demonstrations} is not parts or whole",
            "demonstrations=parts",
        )
        self.options = options
        self.tools = [Lookup().schema]

    def problems(self, seed: int) -> Iterator[Problem]:
        draw, options = random.Random(seed), self.options
        question = f"Read the book of {options.pages} pages."
        while True:
            texts = [" ".join(draw.choice(WORDS) for _ in range(options.words)) for _ in range(options.pages)]
            facts = [[f"page {number}", text] for number, text in enumerate(texts, 1)]
            note, answer = self._part(draw, texts) if options.demonstrations == "parts" else ("", self._whole(texts))
            yield Problem(
                question,
                DONE,
                None,
                {"tools_kwargs": {"lookup": {"create_kwargs": {"facts": facts}}}},
                prompt=[{"role": "user", "content": question + note}],
                answer=answer,
                tools=self.tools,
                agent_name="tool_agent",
                key=str(texts),
            )

    def _part(self, draw: random.Random, texts: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
        """Return the summary that a part of an episode begins with, and its turns."""
        pages = self.options.pages
        start = draw.randrange(pages + 1)
        forgotten = start > 0 and draw.randrange(100) < self.options.forgets
        note = f"\n\n{SUMMARY}\n{self._summary(start, forgotten)}" if start else ""
        begin = 0 if forgotten else start
        stop = min(begin + draw.randint(1, self.options.window), pages)
        turns = [turn for number in range(begin, stop) for turn in self._page(texts, number)]
        if stop == pages and (begin == pages or draw.random() < 0.5):
            return note, [*turns, says(f"#### {DONE}")]
        forgets = draw.randrange(100) < self.options.forgets
        return note, [*turns, {"role": "user", "content": INSTRUCTION}, says(self._summary(stop, forgets))]

    def _whole(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        turns = [turn for number in range(len(texts)) for turn in self._page(texts, number)]
        return [*turns, says(f"#### {DONE}")]

    def _page(self, texts: Sequence[str], number: int) -> list[dict[str, Any]]:
        return [calls("lookup", number, key=f"page {number + 1}"), result("lookup", texts[number], number)]

    def _summary(self, read: int, forgets: bool) -> str:
        return "reading" if forgets else f"read {read}"
