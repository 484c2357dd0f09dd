"""Prompts through training: how often the answers to a dataset row were right, step by step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hone.apps.lab.viewer.episodes import names_in
from hone.apps.lab.viewer.index import Rows
from hone.apps.lab.viewer.queries import GROUP_SORTS, NUMBERS, Groups, sorted_places
from hone.apps.lab.viewer.run import Archived, number, numbers, plain
from hone.errors import HoneError, did_you_mean

PAGE = 200
"""Most rows of an answer."""
EXCERPT = 220
"""Characters of a prompt in a list."""
_COMMON = 20
"""Characters of a common beginning that a list leaves in place."""
_BRIEF = (
    "step", "uid", "index", "part", "fate", "data_source", "row", "seed", "prompt", "messages", "text", "ground_truth",
    "stop_reason", "seconds", "score", "unshaped", "terms", "extra", "error", "cause", "episode",
    "prompt_ids", "response_ids", "response_mask", "advantages",
)  # fmt: skip


def group_list(archived: Archived, query: str, sort: str, offset: int, limit: int) -> dict[str, Any]:
    """Return a page of the groups that have a row which the query leaves: ``total`` groups and ``rows`` that match, and ``groups``.

    ``sort`` is a name of :data:`GROUP_SORTS`, with ``-`` before it for descending order; empty: newest step first.
    """
    rows = archived.rows()
    groups = archived.groups(rows)
    kept_rows = archived.matching(rows, query)
    places = np.arange(len(groups))
    if len(groups) and not kept_rows.all():
        matches = np.add.reduceat(kept_rows[groups.order].astype(np.int64), groups.starts[:-1])
        places = places[matches > 0]
    places = _sorted_groups(groups, places, sort)
    page = places[offset : offset + min(limit, PAGE)].tolist()
    listed = [_group_json(archived, rows, groups, place, kept_rows) for place in page]
    return {"total": len(places), "rows": int(kept_rows.sum()), "offset": offset, "groups": excerpts(listed)}


def excerpts(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cut the prompts of a list's entries, each source's from the word on in which they differ.

    >>> [entry["prompt"] for entry in excerpts([{"source": "", "prompt": f"Copy this number, please: {n}"} for n in (12, 3)])]
    ['… 12', '… 3']
    """
    texts: dict[str, set[str]] = {}
    for entry in listed:
        texts.setdefault(entry["source"], set()).add(entry["prompt"])
    common = {source: os.path.commonprefix(list(seen)) if len(seen) > 1 else "" for source, seen in texts.items()}
    for entry in listed:
        beginning = common[entry["source"]]
        start = max(beginning.rfind(" "), beginning.rfind("\n")) + 1
        cut = start > _COMMON
        entry["prompt"] = "… " * cut + entry["prompt"][start * cut :][:EXCERPT]
    return listed


def _sorted_groups(groups: Groups, places: np.ndarray, sort: str) -> np.ndarray:
    name = sort.removeprefix("-")
    if not name:
        return sorted_places(groups.columns["step"], places, descending=True) if len(places) else places
    if name not in GROUP_SORTS:
        raise HoneError(f"groups have no '{name}'", fix=did_you_mean(name, GROUP_SORTS), code="E-view-query")
    return sorted_places(groups.columns[name], places, descending=sort.startswith("-"))


def _group_json(archived: Archived, rows: Rows, groups: Groups, place: int, kept: np.ndarray) -> dict[str, Any]:
    members, first = groups.members(place), int(groups.first[place])
    step, texts = int(rows["step"][first]), archived.index.texts
    prompts = archived.texts(step, "prompt")
    position = int(rows.position[first])
    return {
        "step": step,
        "uid": texts["uid"][int(rows["uid"][first])],
        "source": texts["source"][int(rows["source"][first])],
        "row": number(rows["row"][first]),
        "fate": texts["fate"][int(rows["fate"][first])],
        "prompt": prompts[position] if position < len(prompts) else "",
        "scores": numbers(rows["score"][members]),
        "matches": [bool(value) for value in kept[members]],
        **{name: number(groups.columns[name][place]) for name in groups.columns if name != "step"},
    }


def answer_list(archived: Archived, query: str, sort: str, offset: int, limit: int) -> dict[str, Any]:
    """Return a page of the answers that a query leaves; see :func:`group_list`. ``sort`` is a column of numbers."""
    rows = archived.rows()
    places = np.flatnonzero(archived.matching(rows, query))
    name = sort.removeprefix("-") or "step"
    if name not in NUMBERS:
        raise HoneError(f"answers have no '{name}'", fix=did_you_mean(name, list(NUMBERS)), code="E-view-query")
    places = sorted_places(rows[name], places, descending=sort.startswith("-") or not sort)
    return {
        "total": len(places),
        "offset": offset,
        "answers": answers_at(archived, rows, places[offset : offset + min(limit, PAGE)]),
    }


def answers_at(archived: Archived, rows: Rows, places: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
    """Return the rows at these places as JSON, each with excerpts of its prompt and the end of its text."""
    answers = []
    for place in places:
        answer = archived.row_json(rows, int(place))
        position = int(rows.position[place])
        for name in ("prompt", "text"):
            texts = archived.texts(answer["step"], name)
            answer[name] = texts[position] if position < len(texts) else ""
        answers.append(answer)
    return excerpts(answers)


def one_group(archived: Archived, step: int, uid: str) -> dict[str, Any]:
    """Return one prompt with its answers.

    ``images`` are the names of the prompt's images. Each answer has ``shared_all`` and ``shared_any``, the number of leading characters that it shares with all other answers, and with at
    least one.
    """
    records = archived.records(step, uid, _BRIEF)
    texts = [record["text"] for record in records]
    common, longest = shared_prefixes(texts)
    first = records[0]
    prompt = {name: first[name] for name in ("step", "uid", "data_source", "row", "prompt", "messages", "ground_truth")}
    answers = [
        _answer(record) | {"shared_all": common, "shared_any": shared}
        for record, shared in zip(records, longest, strict=True)
    ]
    return plain(prompt) | {"answers": answers, "images": names_in(first["prompt_ids"] or [])}


def _answer(record: Mapping[str, Any]) -> dict[str, Any]:
    mask, advantages = record["response_mask"] or [], record["advantages"] or []
    sampled = [value for value, chosen in zip(advantages, mask, strict=False) if chosen and value is not None]
    names = ("index", "part", "fate", "seed", "text", "stop_reason", "seconds", "score", "unshaped", "terms", "extra")
    answer = {name: plain(record[name]) for name in (*names, "error", "cause")}
    episode = record["episode"] or {}
    calls = episode.get("tool_calls") or []
    return answer | {
        "tokens": len(record["response_ids"] or []),
        "sampled": sum(mask),
        "advantage": number(sum(sampled) / len(sampled)) if sampled else None,
        "end": episode.get("end"),
        "turns": episode.get("assistant_turns"),
        "calls": [{"name": call.get("name"), "status": call.get("status")} for call in calls],
    }


def shared_prefixes(texts: Sequence[str]) -> tuple[int, list[int]]:
    """Return how many leading characters all texts share, and for each text how many it shares with at least one other.

    >>> shared_prefixes(["abcd", "abx", "abce"])
    (2, [3, 2, 3])
    """
    if len(texts) < 2:
        return 0, [0] * len(texts)
    order = sorted(range(len(texts)), key=texts.__getitem__)
    longest = [0] * len(texts)
    for left, right in zip(order, order[1:], strict=False):
        common = _common(texts[left], texts[right])
        longest[left], longest[right] = max(longest[left], common), max(longest[right], common)
    return _common(texts[order[0]], texts[order[-1]]), longest


def _common(left: str, right: str) -> int:
    return len(os.path.commonprefix([left, right]))


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
        "prompts": excerpts([_prompt_json(archived, rows, prompts, place) for place in page]),
    }


def _prompt_json(archived: Archived, rows: Rows, prompts: Prompts, place: int) -> dict[str, Any]:
    groups = archived.groups(rows)
    visits = prompts.visits(place)
    first = int(groups.first[visits[0]])
    step, texts = int(rows["step"][first]), archived.index.texts
    known = archived.texts(step, "prompt")
    return {
        "source": texts["source"][int(rows["source"][first])],
        "uid": texts["uid"][int(rows["uid"][first])],
        "course": str(prompts.course[place]),
        "prompt": known[int(rows.position[first])],
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
