"""The index of codes: which question each one answers, and where it is answered."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hone.config.trees import TREES
from hone.preflight.rules import RULES

ELSEWHERE = {
    "R09": ("loading", "Every key exists."),
    "R10": ("first step", "Every key that was set is read by something."),
    "R16": (
        "start",
        "The batch plan: prompts, sequences, mini-batches, updates, tokens and steps, printed at each start.",
    ),
    "R20": ("pilot", "Few groups have answers that are all right or all wrong (`hone train --pilot`)."),
    "R28": ("always", "Sequences are packed, which sequence parallelism needs; there is no padded path to choose."),
    "R37": (
        "pilot",
        "Few tool results are cut, and few calls not carried out (`hone train --pilot`; in a run tool/truncated_rate and "
        "tool/over_limit_rate count them).",
    ),
    "R58": (
        "resume",
        "A run resumed at the end of an epoch goes on with the next one; the position is in the checkpoint.",
    ),
    "R59": ("first step", "The engine's log-probs agree with the trainer's after weights were published."),
    "R64": ("pilot", "Responses end before the limit (`hone train --pilot`)."),
}
"""Codes that are answered at another time than before the run, some of them then too: when, and the question."""


@dataclass(frozen=True)
class CodeEntry:
    """A line of the index."""

    code: str
    when: str
    question: str
    trees: tuple[str, ...] = ()


def index() -> list[CodeEntry]:
    """Return every code in order; a code that several rules bear has one line each."""
    names = {tree: name for name, tree in TREES.items()}
    asked: dict[str, list[CodeEntry]] = defaultdict(list)
    for entry in RULES:
        question = " ".join((entry.check.__doc__ or "").split())
        trees = tuple(names[tree] for tree in entry.trees)
        asked[entry.code].append(CodeEntry(entry.code, entry.stage.name.lower(), question, trees))
    for code, (when, question) in ELSEWHERE.items():
        asked[code].append(CodeEntry(code, when, question))
    return [entry for code in sorted(asked) for entry in asked[code]]


BEGIN = "<!-- Generated from the rules by scripts/make_docs: do not edit from here -->"
END = "<!-- to here -->"


def index_page(existing: str) -> str:
    """Return the page with its index of codes written anew between the markers; the rest stays.

    Raises:
        ValueError: the markers do not stand there once each.
    """
    if existing.count(BEGIN) != 1 or existing.count(END) != 1:
        raise ValueError(
            f"the page has {existing.count(BEGIN)} beginnings and {existing.count(END)} ends of an index, not one"
        )
    head, _, rest = existing.partition(BEGIN)
    lines = ["", "| Code | When | What is asked |", "|---|---|---|"]
    lines += [f"| {entry.code} | {entry.when} | {_in_table(entry)} |" for entry in index()]
    return "\n".join([head + BEGIN, *lines, "", END]) + rest.partition(END)[2]


def _in_table(entry: CodeEntry) -> str:
    every = set(TREES) == set(entry.trees)
    names = (
        "" if every or not entry.trees or entry.trees == ("train",) else f" (`hone {'`, `hone '.join(entry.trees)}`)"
    )
    return entry.question.replace("|", "\\|") + names
