"""The index of codes: what each one checks, and when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hone.config.trees import TREES
from hone.preflight.rules import RULES
from hone.text import replace_between

ELSEWHERE = {
    "R09": ("loading", "Every key exists."),
    "R10": ("tests", "Every key of the tree has code that reads it."),
    "R16": ("start", "Each start prints the batch plan: prompts, sequences, mini-batches, updates, tokens and steps."),
    "R20": ("pilot", "Few groups have answers that are all correct or all wrong (`hone train --pilot`)."),
    "R28": ("always", "Sequences are packed, which sequence parallelism needs; there is no padded path."),
    "R37": (
        "pilot",
        "Few tool results are truncated, and few calls exceed the limit (`hone train --pilot`; in a run tool/truncated_rate and "
        "tool/over_limit_rate count them).",
    ),
    "R58": (
        "resume",
        "A run resumed at the end of an epoch continues with the next one; the checkpoint stores the position.",
    ),
    "R59": ("first step", "The engine's log-probs agree with the trainer's after a weight sync."),
    "R64": ("pilot", "Responses end before the limit (`hone train --pilot`)."),
}
"""Codes checked at another time than before the run (some also before it): when, and what is checked."""


@dataclass(frozen=True)
class CodeEntry:
    """A line of the index."""

    code: str
    when: str
    question: str
    trees: tuple[str, ...] = ()


def index() -> list[CodeEntry]:
    """Return all codes in order; a code of several rules has one entry per rule."""
    names = {tree: name for name, tree in TREES.items()}
    entries: dict[str, list[CodeEntry]] = defaultdict(list)
    for entry in RULES:
        question = " ".join((entry.check.__doc__ or "").split())
        trees = tuple(names[tree] for tree in entry.trees)
        entries[entry.code].append(CodeEntry(entry.code, entry.stage.name.lower(), question, trees))
    for code, (when, question) in ELSEWHERE.items():
        entries[code].append(CodeEntry(code, when, question))
    return [entry for code in sorted(entries) for entry in entries[code]]


BEGIN = "<!-- Generated from the rules by scripts/make_docs: do not edit from here -->"
END = "<!-- to here -->"


def index_page(existing: str) -> str:
    """Return the page with a new index of codes between the markers; the rest is unchanged.

    Raises ValueError: the page does not have each marker exactly once.
    """
    lines = ["| Code | When | Check |", "|---|---|---|"]
    lines += [f"| {entry.code} | {entry.when} | {_in_table(entry)} |" for entry in index()]
    return replace_between(existing, BEGIN, END, "\n".join(lines))


def _in_table(entry: CodeEntry) -> str:
    every = set(TREES) == set(entry.trees)
    names = (
        "" if every or not entry.trees or entry.trees == ("train",) else f" (`hone {'`, `hone '.join(entry.trees)}`)"
    )
    return entry.question.replace("|", "\\|") + names
