"""Ready questions about a run: each is a query, with the order in which its answers are read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np

from hone.apps.lab.triage import TAIL, expected_pattern
from hone.apps.lab.viewer.index import Rows, RunIndex
from hone.apps.lab.viewer.prompts import prompts_of, right_score
from hone.apps.lab.viewer.queries import MASKS
from hone.apps.lab.viewer.run import Archived
from hone.errors import HoneError


@dataclass(frozen=True)
class Question:
    name: str  # name in addresses
    title: str
    about: str  # what an answer means
    view: str  # ``answers`` or ``groups``
    query: str  # query of :mod:`hone.apps.lab.viewer.queries`
    sort: str = ""  # order of the list


QUESTIONS = (
    Question("rejected", "Right answer rejected?", "The end of the answer has the expected text, and the score is low: look at the "
             "reward's parsing.", "answers", "is:rejected"),
    Question("longer", "Reward up while length explodes?", "The prompt's answers score no worse than at its first visit and are at "
             "least twice as long.", "groups", "is:longer", "-tokens"),
    Question("identical", "Identical answers?", "At least half of a group's answers are the same text: too little exploration.",
             "groups", "is:identical"),
    Question("equal", "Groups that taught nothing?", "All answers have the same score, so every advantage is 0.", "groups", "is:equal"),
    Question("tools", "Which tool calls failed?", "A call was malformed, unknown, too slow, or raised.", "answers", "toolerrors>0",
             "-toolerrors"),
    Question("ratio", "Largest log-ratio?", "The update moved these tokens most: new minus old log-prob.", "answers", "ratio>0", "-ratio"),
    Question("gap", "Where do engine and trainer disagree?", "Their log-probs of a token differ by more than rounding does, 0.02 nats.",
             "answers", "gap>0.02", "-gap"),
    Question("influence", "Most influential on the update?", "Largest sum of |advantage x correction| over the tokens of the loss.",
             "answers", "influence>0", "-influence"),
    Question("cut", "Cut off by the length limit?", "The answer has no end, and mostly no result.", "answers", "stop:length", "-tokens"),
    Question("verdict", "Without a verdict?", "The reward failed on these answers.", "answers", "error=1"),
    Question("labelled", "Labelled by a person?", "Labels and comments of labels.jsonl; label:good finds one of them.", "answers", "label:any"),
)  # fmt: skip


def count(archived: Archived, name: str) -> dict[str, int]:
    """Return how many answers a question finds, as ``count``."""
    question = next((question for question in QUESTIONS if question.name == name), None)
    if question is None:
        raise HoneError(f"no question '{name}'", fix="choose one of the page", code="E-view-address")
    return {"count": int(archived.matching(archived.rows(), question.query).sum())}


def _group_of_rows(archived: Archived, rows: Rows) -> np.ndarray:
    groups = archived.groups(rows)
    result = np.zeros(len(rows), np.int64)
    result[groups.order] = np.repeat(np.arange(len(groups)), np.diff(groups.starts))
    return result


def _equal(archived: Archived, rows: Rows) -> np.ndarray:
    groups = archived.groups(rows)
    return ((groups.columns["spread"] == 0) & (groups.columns["n"] > 1))[_group_of_rows(archived, rows)]


def _identical(archived: Archived, rows: Rows) -> np.ndarray:
    group, same = _group_of_rows(archived, rows), rows["same"]
    known = ~np.isnan(same)
    _, place, counts = np.unique(
        group * 2**32 + np.nan_to_num(same).astype(np.int64), return_inverse=True, return_counts=True
    )
    size = archived.groups(rows).columns["n"][group]
    return known & (counts[place] * 2 >= size) & (size > 1)


def _longer(archived: Archived, rows: Rows) -> np.ndarray:
    groups, prompts = archived.groups(rows), prompts_of(archived, rows)
    begins = np.repeat(prompts.order[prompts.starts[:-1]], np.diff(prompts.starts)) if len(groups) else prompts.order
    first = np.zeros(len(groups), np.int64)
    first[prompts.order] = begins
    tokens, score = groups.columns["tokens"], groups.columns["score"]
    with np.errstate(invalid="ignore"):
        longer = (tokens >= 2 * tokens[first]) & (score >= score[first])
    return longer[_group_of_rows(archived, rows)]


def _rejected(archived: Archived, rows: Rows) -> np.ndarray:
    low = rows["score"] < right_score(rows["score"])
    low &= rows["stop"] != (archived.index.code("stop", "length") or -1)
    result = np.zeros(len(rows), bool)
    for step in np.unique(rows["step"][low]).tolist():
        places = np.flatnonzero(rows["step"] == step)
        ends = archived.derived_of_step("rejected", int(step), lambda step=int(step): ends_right(archived.index, step))
        if len(ends) == len(places):
            result[places] = ends
    return result & low


def ends_right(index: RunIndex, step: int) -> np.ndarray:
    """Return for each row of a step whether the expected text is a word near the end of the answer."""
    try:
        table = index.archive.table(step, ["text", "ground_truth"])
    except HoneError:
        return np.zeros(0, bool)
    pairs = zip(table["text"].to_pylist(), table["ground_truth"].to_pylist(), strict=True)
    patterns: dict[str, re.Pattern[str] | None] = {}
    result = []
    for text, encoded in pairs:
        if encoded is not None and encoded not in patterns:
            patterns[encoded] = expected_pattern(json.loads(encoded))
        pattern = patterns.get(encoded) if encoded is not None else None
        result.append(pattern is not None and pattern.search(text[-TAIL:]) is not None)
    return np.array(result, bool)


_IS = {"rejected": _rejected, "longer": _longer, "identical": _identical, "equal": _equal}


def _is(archived: Archived, rows: Rows, value: str) -> np.ndarray:
    if value not in _IS:
        raise HoneError(f"'is' has no '{value}'", fix=f"is:{' is:'.join(_IS)}", code="E-view-query")
    return _IS[value](archived, rows)


MASKS["is"] = _is
