"""Filters, groups and text search over the rows of a run.

A query is words separated by blanks: ``score<0.5 stop:length tools>0 "exact phrase"``. A word with a comparison restricts a column; every
other word must be in the prompt, the answer or a tool's output, in any case. ``-`` before a word negates it.
"""

from __future__ import annotations

import re
import shlex
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hone.apps.lab.viewer.index import CODES, Rows, RunIndex, pc
from hone.errors import HoneError, did_you_mean

NUMBERS = {
    "step": "training step",
    "index": "number of the answer within its group",
    "part": "segment of the episode",
    "row": "row of the dataset",
    "score": "reward",
    "seconds": "wall time of the answer",
    "error": "1 without a verdict",
    "tokens": "tokens after the prompt",
    "sampled": "tokens that the policy sampled",
    "advantage": "mean advantage",
    "ratio": "largest |new - old log-prob|",
    "gap": "largest |trainer - engine log-prob|",
    "entropy": "mean entropy in nats",
    "influence": "sum of |advantage x correction| over the loss tokens",
    "correction": "mean weight of the rollout correction",
    "lag": "updates between the oldest token and the newest of the step",
    "turns": "turns of the policy",
    "calls": "tool calls",
    "toolerrors": "tool calls that failed",
}
"""Columns of numbers that a query can compare."""
WORDS = {
    "uid": "prompt group",
    "fate": "fate",
    "source": "data source",
    "stop": "stop reason",
    "end": "end of an episode",
    "is": "rejected, longer, identical or equal",
    "label": "label or comment of a person",
}
"""Columns of texts that a query can compare."""
MASKS: dict[str, Callable[[Any, Rows, str], np.ndarray]] = {}
"""Columns that are computed by a function of an archive, its rows and the value; filled by the modules that define them."""
_COMPARISON = re.compile(r"(-?)([a-z_]+)(<=|>=|!=|<|>|=|:)(.+)", re.DOTALL)
_SEARCHED = ("prompt", "text", "episode")
_HELD_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Condition:
    """One word of a query."""

    column: str  # column that is compared; empty for a search in the texts
    operator: str  # ``<``, ``<=``, ``>``, ``>=``, ``=`` or ``!=``; ``=`` for a search
    value: str  # what is compared with
    negated: bool = False  # whether the condition must be false


def parse(query: str) -> list[Condition]:
    try:
        words = shlex.split(query)
    except ValueError:  # a quote that is still open while the query is typed
        words = query.replace('"', " ").replace("'", " ").split()
    return [_condition(word) for word in words]


def _condition(word: str) -> Condition:
    match = _COMPARISON.fullmatch(word)
    if match is None or match[2] not in {**NUMBERS, **WORDS} and not re.fullmatch(r"[a-z]+", match[2]):
        negated = len(word) > 1 and word.startswith("-")
        return Condition("", "=", word[1:] if negated else word, negated)
    minus, column, operator, value = match.groups()
    if column not in NUMBERS and column not in WORDS:
        if operator in (":", "=") and "/" in value:  # an address in a text
            return Condition("", "=", word.removeprefix("-"), bool(minus))
        raise HoneError(
            f"no column '{column}'", where=word, fix=did_you_mean(column, [*NUMBERS, *WORDS]), code="E-view-query"
        )
    operator = "=" if operator == ":" else operator
    if column in WORDS and operator not in ("=", "!="):
        raise HoneError(f"'{column}' is a text", where=word, fix=f"{column}:{value}", code="E-view-query")
    if column in NUMBERS:
        try:
            float(value)
        except ValueError:
            raise HoneError(
                f"'{value}' is not a number", where=word, fix=f"{column}>0, for example", code="E-view-query"
            ) from None
    return Condition(column, operator, value, bool(minus))


class Search:
    """Text search in an archive; the texts of recent steps are kept in memory."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._held: OrderedDict[tuple[int, tuple[int, int] | None], pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def mask(self, rows: Rows, wanted: str, among: np.ndarray) -> np.ndarray:
        """Return which rows have a text in their prompt, answer or episode; only rows of ``among`` are searched."""
        result = np.zeros(len(rows), bool)
        steps = rows["step"]
        for step in np.unique(steps[among]).tolist():
            places = np.flatnonzero(steps == step)
            with self._lock:
                table = self._texts(int(step))
            if table is None or len(table) != len(places):
                continue
            has = np.zeros(len(table), bool)
            for name in _SEARCHED:
                pattern = wanted if name != "episode" else wanted.replace("\n", "\\n").replace('"', '\\"')
                matches = pc.match_substring(table[name], pattern, ignore_case=True)
                has |= np.asarray(pc.fill_null(matches, False))
            result[places] = has
        return result & among

    def _texts(self, step: int) -> pa.Table | None:
        key = step, self._index.stamp(step)
        if key not in self._held:
            try:
                self._held[key] = self._index.archive.table(step, list(_SEARCHED))
            except HoneError:
                return None
            while sum(table.nbytes for table in self._held.values()) > _HELD_BYTES and len(self._held) > 1:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        return self._held[key]


def matching(
    index: RunIndex, search: Search, rows: Rows, query: str, masks: Callable[[str, str], np.ndarray]
) -> np.ndarray:
    """Return which rows a query leaves; ``masks`` gives the rows with a value in a column of :data:`MASKS`."""
    mask = np.ones(len(rows), bool)
    conditions = sorted(parse(query), key=lambda condition: not condition.column)  # texts last, in fewer rows
    for condition in conditions:
        if not condition.column:
            kept = search.mask(rows, condition.value, mask)
        elif condition.column in MASKS:
            kept = masks(condition.column, condition.value)
            kept = ~kept if condition.operator == "!=" else kept
        elif condition.column in CODES:
            kept = _has_text(index, rows, condition)
        else:
            kept = _compare(rows[condition.column], condition.operator, float(condition.value))
        mask &= ~kept if condition.negated else kept
    return mask


def _has_text(index: RunIndex, rows: Rows, condition: Condition) -> np.ndarray:
    """Rows whose text contains the value; for ``uid`` is it."""
    texts = index.texts[condition.column]
    if condition.column == "uid":
        codes = [index.code("uid", condition.value)]
    else:
        codes = [code for code, text in enumerate(texts) if text and condition.value.casefold() in text.casefold()]
    kept = np.isin(rows[condition.column], [code for code in codes if code is not None])
    return ~kept if condition.operator == "!=" else kept


def _compare(values: np.ndarray, operator: str, number: float) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        match operator:
            case "<":
                return values < number
            case "<=":
                return values <= number
            case ">":
                return values > number
            case ">=":
                return values >= number
        equal = np.isclose(values, number, rtol=1e-6, atol=1e-9) if number % 1 else values == number
        return ~equal if operator == "!=" else equal


# groups --------------------------------------------------------------------------------------------------------------

GROUP_SORTS = ("step", "score", "spread", "tokens", "advantage", "ratio", "gap", "influence", "toolerrors", "n")


@dataclass(frozen=True)
class Groups:
    """Prompt groups of a run, ordered by step, then as in the file."""

    first: np.ndarray  # row of the first member of each group
    order: np.ndarray  # rows sorted by group; those of group g are ``order[starts[g]:starts[g + 1]]``
    starts: np.ndarray  # see ``order``; one more than groups
    # numbers by group: ``n``, ``score`` (mean), ``spread`` (standard deviation), ``lowest``, ``highest``, ``tokens``
    # (mean), and the largest ``advantage`` (absolute), ``ratio``, ``gap``, ``influence``, and the sum of ``toolerrors``
    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.first)

    def members(self, group: int) -> np.ndarray:
        """Return the rows of a group."""
        return self.order[self.starts[group] : self.starts[group + 1]]


def group_rows(rows: Rows) -> Groups:
    """Group all rows by step and uid. A mean ignores rows without the number; it is NaN if none has it."""
    if not len(rows):
        empty = np.zeros(0, np.int64)
        return Groups(empty, empty, np.zeros(1, np.int64), {name: np.zeros(0) for name in (*GROUP_SORTS, "lowest")})
    key = rows["step"].astype(np.int64) * (int(rows["uid"].max()) + 1) + rows["uid"]
    order = np.argsort(key, kind="stable")
    changes = np.flatnonzero(np.diff(key[order])) + 1
    starts = np.concatenate([[0], changes, [len(order)]])
    first = order[starts[:-1]]
    in_file = np.argsort(first, kind="stable")  # groups in the order of their first row
    order = np.concatenate([order[starts[g] : starts[g + 1]] for g in in_file]) if len(in_file) else order
    starts = np.concatenate([[0], np.cumsum(np.diff(starts)[in_file])])
    first = first[in_file]
    begins, counts = starts[:-1], np.diff(starts)

    def largest(name: str) -> np.ndarray:
        values = np.abs(rows[name][order])
        known = np.maximum.reduceat(np.where(np.isnan(values), -np.inf, values), begins)
        return np.where(np.isinf(known), np.nan, known)

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.nan_to_num(values), begins)

    score = rows["score"][order].astype(np.float64)
    known = np.add.reduceat(~np.isnan(score), begins, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total(score) / np.where(known, known, np.nan)
        spread = np.sqrt(np.maximum(total(score**2) / np.where(known, known, np.nan) - mean**2, 0))
        tokens = np.add.reduceat(rows["tokens"][order].astype(np.float64), begins) / counts
    lowest = np.minimum.reduceat(np.where(np.isnan(score), np.inf, score), begins)
    highest = np.maximum.reduceat(np.where(np.isnan(score), -np.inf, score), begins)
    columns = {
        "step": rows["step"][first].astype(np.float64),
        "n": counts.astype(np.float64),
        "score": mean,
        "spread": np.where(spread < 1e-7, 0.0, spread),
        "lowest": np.where(np.isinf(lowest), np.nan, lowest),
        "highest": np.where(np.isinf(highest), np.nan, highest),
        "tokens": tokens,
        "toolerrors": total(rows["toolerrors"][order]),
        **{name: largest(name) for name in ("advantage", "ratio", "gap", "influence")},
    }
    return Groups(first, order, starts, columns)


def sorted_places(values: np.ndarray, places: np.ndarray, *, descending: bool) -> np.ndarray:
    """Return ``places`` sorted by their values; those without a value come last, equal ones keep their order."""
    keys = values[places].astype(np.float64)
    keys = np.where(np.isnan(keys), np.inf, -keys if descending else keys)
    return places[np.argsort(keys, kind="stable")]
