"""Lists of groups and answers, and one group with its answers side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hone.apps.lab.viewer.images import names_in
from hone.apps.lab.viewer.index import Rows
from hone.apps.lab.viewer.queries import GROUP_SORTS, NUMBERS, Groups, sorted_places
from hone.apps.lab.viewer.run import Archived, number, numbers, plain
from hone.errors import HoneError, did_you_mean

PAGE = 200
"""Most rows of an answer."""
EXCERPT = 220
"""Characters of a prompt in a list."""
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
    return {
        "total": len(places),
        "rows": int(kept_rows.sum()),
        "offset": offset,
        "groups": [_group_json(archived, rows, groups, place, kept_rows) for place in page],
    }


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
    prompts = archived.prompts(step)
    position = int(rows.position[first])
    return {
        "step": step,
        "uid": texts["uid"][int(rows["uid"][first])],
        "source": texts["source"][int(rows["source"][first])],
        "row": number(rows["row"][first]),
        "fate": texts["fate"][int(rows["fate"][first])],
        "prompt": prompts[position][:EXCERPT] if position < len(prompts) else "",
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
    """Return the rows at these places as JSON, each with an excerpt of its prompt."""
    answers = []
    for place in places:
        answer = archived.row_json(rows, int(place))
        prompts, position = archived.prompts(answer["step"]), int(rows.position[place])
        answer["prompt"] = prompts[position][:EXCERPT] if position < len(prompts) else ""
        answers.append(answer)
    return answers


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
