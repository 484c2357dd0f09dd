"""Comparison of two sets of answers: two runs, two steps, or any two filters."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hone.apps.lab.viewer.prompts import excerpts, right_score
from hone.apps.lab.viewer.run import Archived, number
from hone.errors import HoneError

SAMPLED = 1500
"""Most answers of a side that are read for phrases and tools."""
_WORD = re.compile(r"\w+|[^\w\s]")
_LONGEST, _SHORT = 5, 3
_PHRASES, _PAIRS = 24, 400


def compare(first: Archived, first_query: str, second: Archived, second_query: str) -> dict[str, Any]:
    """Compare the answers that two queries leave.

    ``sides`` (numbers of each), ``stops``, ``tools`` and ``ends`` (shares by name, a pair each), ``phrases`` (``more`` and ``less``
    frequent in the second), ``paired`` prompts with both means, the largest difference first, and ``same_seed``: how many
    answers have the same seed, how many of their texts are equal, and the mean difference of their scores.
    """
    chosen = [_Side(first, first_query), _Side(second, second_query)]
    for side in chosen:
        if not side.kept.any():
            raise HoneError(
                f"no answers for '{side.query}'", fix="another run, step or filter", code="E-view-comparison"
            )
    texts = [side.read() for side in chosen]
    return {
        "sides": [side.numbers() for side in chosen],
        "stops": _shares(*(side.words("stop") for side in chosen)),
        "ends": _shares(*(side.words("end") for side in chosen)),
        "tools": _shares(*(Counter(name for record in records for name in _tools(record)) for records in texts)),
        "phrases": phrases(*([record["text"] for record in records] for records in texts)),
        "paired": _paired(*chosen),
        "same_seed": _same_seed(*texts),
        "read": [len(records) for records in texts],
    }


class _Side:
    def __init__(self, archived: Archived, query: str) -> None:
        self.archived, self.query = archived, query
        archived.rows()
        archived.index.wait()  # means of half the answers would mislead
        self.rows = archived.rows()
        self.kept = archived.matching(self.rows, query)

    def numbers(self) -> dict[str, Any]:
        rows, kept = self.rows, self.kept
        score = rows["score"][kept]
        right = (score >= right_score(rows["score"]))[np.isfinite(score)]
        return {
            "query": self.query,
            "answers": int(kept.sum()),
            "steps": [int(rows["step"][kept].min()), int(rows["step"][kept].max())],
            "right": number(right.mean()) if len(right) else None,
            **{
                name: number(_mean(rows[name][kept]))
                for name in ("score", "tokens", "entropy", "turns", "calls", "toolerrors")
            },
        }

    def words(self, name: str) -> Counter[str]:
        codes, counts = np.unique(self.rows[name][self.kept], return_counts=True)
        texts = self.archived.index.texts[name]
        return Counter({texts[int(code)]: int(count) for code, count in zip(codes, counts, strict=True) if code})

    def read(self) -> list[dict[str, Any]]:
        """Read answers spread evenly over the side."""
        places = np.flatnonzero(self.kept)
        places = places[:: max(1, math.ceil(len(places) / SAMPLED))]
        records = []
        for step in np.unique(self.rows["step"][places]).tolist():
            positions = self.rows.position[places[self.rows["step"][places] == step]]
            columns = ["data_source", "row", "uid", "seed", "score", "text", "episode"]
            table = self.archived.index.archive.table(int(step), columns).take(positions)
            records += table.to_pylist()
        return records

    def prompts(self) -> dict[tuple[str, Any], tuple[float, float, int, int]]:
        """Return mean score, mean length, step and first row by prompt."""
        rows, places = self.rows, np.flatnonzero(self.kept)
        row = np.nan_to_num(rows["row"][places], nan=-1).astype(np.int64)
        key = np.where(
            row >= 0, rows["source"][places].astype(np.int64) << 40 | row, -1 - rows["uid"][places].astype(np.int64)
        )
        _, begins, group = np.unique(key, return_index=True, return_inverse=True)
        counts = np.bincount(group)
        score = np.bincount(group, np.nan_to_num(rows["score"][places])) / counts
        tokens = np.bincount(group, np.nan_to_num(rows["tokens"][places])) / counts
        texts, result = self.archived.index.texts, {}
        for prompt, begin in enumerate(begins.tolist()):
            place = int(places[begin])
            name = texts["source"][int(rows["source"][place])]
            label = int(row[begin]) if row[begin] >= 0 else texts["uid"][int(rows["uid"][place])]
            result[name, label] = (float(score[prompt]), float(tokens[prompt]), int(rows["step"][place]), place)
        return result


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _tools(record: dict[str, Any]) -> Iterable[str]:
    names = re.findall(r'"name": ?"([^"]+)", ?"arguments": ?(?:\{|null)', record["episode"] or "")
    return set(names)


def _shares(first: Counter[str], second: Counter[str]) -> list[dict[str, Any]]:
    totals = [max(1, sum(counter.values())) for counter in (first, second)]
    names = sorted({*first, *second}, key=lambda name: -(first[name] + second[name]))
    return [{"name": name, "first": first[name] / totals[0], "second": second[name] / totals[1]} for name in names]


def phrases(first: list[str], second: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the phrases of one to five words whose share of answers differs most, by the z score of the difference.

    A phrase that overlaps with one of a larger difference is left out.
    """
    counters = []
    for texts in (first, second):
        counter: Counter[tuple[str, ...]] = Counter()
        for text in texts:
            words = [word.lower() for word in _WORD.findall(text[:6000])]
            present = {
                tuple(words[at : at + size]) for size in range(1, _LONGEST + 1) for at in range(len(words) - size + 1)
            }
            counter.update(phrase for phrase in present if _is_telling(phrase))
        counters.append(counter)
    sizes = [max(1, len(first)), max(1, len(second))]
    scored = []
    for phrase in {*counters[0], *counters[1]}:
        counts = [counters[0][phrase], counters[1][phrase]]
        if sum(counts) < max(3, 0.01 * sum(sizes)):
            continue
        shares = [count / size for count, size in zip(counts, sizes, strict=True)]
        pooled = sum(counts) / sum(sizes)
        deviation = math.sqrt(max(pooled * (1 - pooled), 1e-9) * (1 / sizes[0] + 1 / sizes[1]))
        scored.append(((shares[1] - shares[0]) / deviation, phrase, shares))
    return {
        "more": _without_parts(sorted(scored, key=lambda entry: (-round(entry[0], 1), -len(entry[1]), entry[1])), 1),
        "less": _without_parts(sorted(scored, key=lambda entry: (round(entry[0], 1), -len(entry[1]), entry[1])), -1),
    }


def _is_telling(phrase: Sequence[str]) -> bool:
    """Return whether a phrase begins and ends with a word, and is not one short word."""
    return phrase[0].isalpha() and phrase[-1].isalpha() and (len(phrase) > 1 or len(phrase[0]) > _SHORT)


def _without_parts(scored: list[tuple[float, tuple[str, ...], list[float]]], sign: int) -> list[dict[str, Any]]:
    """Return the best phrases; an overlap is a pair of neighbouring words, or a single word, that a better phrase has."""
    kept: list[dict[str, Any]] = []
    taken: set[tuple[str, ...]] = set()
    for z, phrase, shares in scored:
        if len(kept) == _PHRASES or z * sign < 2:
            break
        parts = {phrase[at : at + 2] for at in range(len(phrase) - 1)} if len(phrase) > 1 else {phrase}
        if parts & taken:
            continue
        taken |= parts | {(word,) for word in phrase}
        shown = re.sub(r" ([^\w\s])", r"\1", " ".join(phrase))
        kept.append({"phrase": shown, "first": shares[0], "second": shares[1], "z": round(z, 2)})
    return kept


def _paired(first: _Side, second: _Side) -> dict[str, Any]:
    left, right = first.prompts(), second.prompts()
    both = [key for key in left if key in right]
    differences = np.array([right[key][0] - left[key][0] for key in both])
    order = sorted(range(len(both)), key=lambda place: -abs(differences[place]))[:_PAIRS]
    prompts = []
    for place in order:
        key = both[place]
        a, b = left[key], right[key]
        shown = second.archived.texts(b[2], "prompt")[int(second.rows.position[b[3]])]
        uids = [
            side.archived.index.texts["uid"][int(side.rows["uid"][entry[3]])]
            for side, entry in ((first, a), (second, b))
        ]
        prompts.append(
            {
                "source": key[0],
                "row": key[1],
                "prompt": shown,
                "scores": [number(a[0]), number(b[0])],
                "tokens": [number(a[1]), number(b[1])],
                "at": [{"step": a[2], "uid": uids[0]}, {"step": b[2], "uid": uids[1]}],
            }
        )
    deviation = float(differences.std(ddof=1)) / math.sqrt(len(both)) if len(both) > 1 else math.nan
    return {
        "prompts": excerpts(prompts),
        "count": len(both),
        "better": int((differences > 1e-9).sum()),
        "worse": int((differences < -1e-9).sum()),
        "mean": number(differences.mean()) if len(both) else None,
        "error": number(deviation),
    }


def _same_seed(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many answers of both sides have the same prompt and seed, and how they differ."""
    by_seed = {(record["data_source"], record["row"], record["seed"]): record for record in first if record["seed"]}
    pairs = [
        (by_seed[key], record)
        for record in second
        if (key := (record["data_source"], record["row"], record["seed"])) in by_seed
    ]
    scored = [(a["score"], b["score"]) for a, b in pairs if a["score"] is not None and b["score"] is not None]
    return {
        "pairs": len(pairs),
        "equal": sum(a["text"] == b["text"] for a, b in pairs),
        "difference": number(sum(b - a for a, b in scored) / len(scored)) if scored else None,
    }
