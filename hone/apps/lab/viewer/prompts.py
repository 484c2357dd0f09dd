"""Prompts through training: how often the answers to a dataset row were right, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hone.apps.lab.viewer.groups import EXCERPT, PAGE
from hone.apps.lab.viewer.index import Rows
from hone.apps.lab.viewer.queries import Groups, sorted_places
from hone.apps.lab.viewer.run import Archived, number, numbers
from hone.errors import HoneError

COURSES = {
    "learned": "right at the end, and rarely at first",
    "unlearned": "once right, and rarely at the end",
    "never": "no answer was ever right",
    "always": "right from the first visit on",
    "open": "none of these",
}
"""Course of a prompt through training."""
MOSTLY, RARELY = 0.75, 0.34
"""Shares of right answers that count as most and as few."""
SORTS = ("row", "visits", "first", "last", "best", "gain", "tokens")


@dataclass(frozen=True)
class Prompts:
    """Dataset rows with their visits; a visit is a group."""

    order: np.ndarray  # groups sorted by prompt, then by step; those of prompt p are ``order[starts[p]:starts[p + 1]]``
    starts: np.ndarray  # see ``order``; one more than prompts
    right: np.ndarray  # share of right answers by group; NaN without a verdict
    columns: dict[str, np.ndarray]  # numbers by prompt, see :data:`SORTS`
    course: np.ndarray  # a name of :data:`COURSES` by prompt

    def visits(self, prompt: int) -> np.ndarray:
        """Return the groups of a prompt."""
        return self.order[self.starts[prompt] : self.starts[prompt + 1]]


def right_score(scores: np.ndarray) -> float:
    """Return the score from which an answer counts as right: the middle between the lowest and the highest of the run."""
    known = scores[np.isfinite(scores)]
    return float((known.min() + known.max()) / 2) if len(known) else 0.5


def prompts_of(archived: Archived, rows: Rows) -> Prompts:
    return archived.derived("prompts", rows, lambda: _prompts(rows, archived.groups(rows)))


def _prompts(rows: Rows, groups: Groups) -> Prompts:
    first = groups.first
    source_row = np.nan_to_num(rows["row"][first], nan=-1).astype(np.int64)
    # rows of a dataset are named by source and row; sequences without a row by their uid
    code = np.where(
        source_row >= 0,
        rows["source"][first].astype(np.int64) << 40 | source_row,
        -1 - rows["uid"][first].astype(np.int64),
    )
    order = np.lexsort((groups.columns["step"], code))
    changes = np.flatnonzero(np.diff(code[order])) + 1
    starts = np.concatenate([[0], changes, [len(order)]]) if len(order) else np.zeros(1, np.int64)
    scores = rows["score"][groups.order]
    passes, known = (scores >= right_score(rows["score"])).astype(float), np.isfinite(scores).astype(float)
    if not len(order):
        return Prompts(order, starts, np.zeros(0), {name: np.zeros(0) for name in SORTS}, np.zeros(0, object))
    counts = np.add.reduceat(known, groups.starts[:-1])
    right = np.add.reduceat(passes * known, groups.starts[:-1]) / np.where(counts > 0, counts, np.nan)
    begins, ends = starts[:-1], starts[1:] - 1
    sorted_right, sorted_tokens = right[order], groups.columns["tokens"][order]
    best = np.maximum.reduceat(np.nan_to_num(sorted_right), begins)
    visits = np.diff(starts)
    first_right, last_right = sorted_right[begins], sorted_right[ends]
    columns = {
        "row": source_row[order[begins]].astype(float),
        "visits": visits.astype(float),
        "first": first_right,
        "last": last_right,
        "best": best,
        "gain": last_right - first_right,
        "tokens": sorted_tokens[ends] / np.maximum(sorted_tokens[begins], 1),
    }
    course = np.full(len(visits), "open", object)
    lowest = np.minimum.reduceat(np.nan_to_num(sorted_right), begins)
    course[lowest >= MOSTLY] = "always"
    course[(last_right >= MOSTLY) & (first_right < 0.5)] = "learned"
    course[(best >= 0.5) & (last_right <= RARELY) & (visits > 1)] = "unlearned"
    course[best == 0] = "never"
    return Prompts(order, starts, right, columns, course)


def prompt_list(archived: Archived, query: str, course: str, sort: str, offset: int, limit: int) -> dict[str, Any]:
    """Return a page of the prompts that have a row which the query leaves, and the number of prompts of each course."""
    name = sort.removeprefix("-") or "gain"
    if name not in SORTS or (course and course not in COURSES):
        raise HoneError(
            f"prompts have no '{name}' or '{course}'", fix=f"{SORTS}, {tuple(COURSES)}", code="E-view-query"
        )
    rows = archived.rows()
    groups, prompts = archived.groups(rows), prompts_of(archived, rows)
    places = np.arange(len(prompts.course))
    kept = archived.matching(rows, query)
    if len(places) and not kept.all():
        by_group = np.add.reduceat(kept[groups.order].astype(np.int64), groups.starts[:-1])
        places = places[np.add.reduceat(by_group[prompts.order], prompts.starts[:-1]) > 0]
    counts = {name: int((prompts.course[places] == name).sum()) for name in COURSES}
    if course:
        places = places[prompts.course[places] == course]
    places = sorted_places(prompts.columns[name], places, descending=sort.startswith("-") or not sort)
    page = places[offset : offset + min(limit, PAGE)].tolist()
    return {
        "total": len(places),
        "offset": offset,
        "courses": counts,
        "right": right_score(rows["score"]),
        "prompts": [_prompt_json(archived, rows, prompts, place) for place in page],
    }


def _prompt_json(archived: Archived, rows: Rows, prompts: Prompts, place: int) -> dict[str, Any]:
    groups = archived.groups(rows)
    visits = prompts.visits(place)
    first = int(groups.first[visits[0]])
    step, texts = int(rows["step"][first]), archived.index.texts
    known = archived.prompts(step)
    return {
        "source": texts["source"][int(rows["source"][first])],
        "uid": texts["uid"][int(rows["uid"][first])],
        "course": str(prompts.course[place]),
        "prompt": known[int(rows.position[first])][:EXCERPT],
        "steps": numbers(groups.columns["step"][visits]),
        "right": numbers(prompts.right[visits]),
        **{name: number(values[place]) for name, values in prompts.columns.items()},
    }


def one_prompt(archived: Archived, source: str, row: int, uid: str) -> dict[str, Any]:
    """Return all visits of a prompt, in order of steps; a sequence without a row (below 0) has its group's uid."""
    rows = archived.rows()
    groups, prompts = archived.groups(rows), prompts_of(archived, rows)
    texts = archived.index.texts
    for place in range(len(prompts.course)):
        visits = prompts.visits(place)
        first = int(groups.first[visits[0]])
        same = texts["source"][int(rows["source"][first])] == source and prompts.columns["row"][place] == row
        if same and (row >= 0 or texts["uid"][int(rows["uid"][first])] == uid):
            break
    else:
        raise HoneError(f"no prompt of '{source}', row {row}", fix="choose a prompt of the list", code="E-view-address")
    entries = [
        {
            "step": int(groups.columns["step"][visit]),
            "uid": texts["uid"][int(rows["uid"][groups.first[visit]])],
            "right": number(prompts.right[visit]),
            "scores": numbers(rows["score"][groups.members(visit)]),
            **{name: number(groups.columns[name][visit]) for name in ("n", "score", "tokens")},
        }
        for visit in visits
    ]
    return _prompt_json(archived, rows, prompts, place) | {"visits": entries}
