"""Check that rows can be scored: a known kind of problem, and a readable ground truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from hone.data.checks.tally import Problem, Tally
from hone.data.files import Row
from hone.data.messages import unwrapped
from hone.errors import DataError, Finding, did_you_mean

_NO_SOURCE = Problem(
    "R42",
    "the kind of problem is not a string",
    "it selects the scorer and groups the validation metrics",
    "write data_source as a string",
)
_NO_OBJECT = Problem(
    "R42",
    "reward_model or extra_info is not an object",
    "the scorer does not receive the ground truth",
    'write {"style": "rule", "ground_truth": "42"}',
)
_NO_TRUTH = Problem(
    "R44",
    "reward_model.ground_truth is missing or empty",
    "answers to these prompts cannot be scored as right or wrong",
    "fill it in, or remove the rows",
)
_SOME_TRUTH = Problem(
    "R44",
    "reward_model.ground_truth is missing or empty, and other rows have one",
    "a reward function that compares with it would fail on these rows",
    "fill it in, or remove the rows",
    stops=False,
)


def source_names(rows: Sequence[Row], key: str) -> Iterator[Finding]:
    """Check that column ``key`` names the kind of problem, and that reward_model and extra_info are objects."""
    tally = Tally(len(rows))
    for row in rows:
        if not isinstance(row.values.get(key), str):
            tally.add(row, _NO_SOURCE, f"{row.values.get(key)!r}")
        for name in ("reward_model", "extra_info"):
            value = row.values.get(name)
            if value is not None and not isinstance(value, dict):
                tally.add(row, _NO_OBJECT, f"{name} is a {type(value).__name__}")
    yield from tally.findings()


def unknown_sources(
    rows: Sequence[Row], key: str, is_known: Callable[[str], bool], known: Collection[str]
) -> Iterator[Finding]:
    """Report data sources without a scorer; ``known`` are the names to suggest."""
    counts = Counter(str(row.values.get(key)) for row in rows if isinstance(row.values.get(key), str))
    for source, count in counts.most_common():
        if not is_known(source):
            what = f"data_source '{source}' ({count} rows) has no reward. {did_you_mean(source, known)}"
            yield Finding(
                DataError(
                    what,
                    why="answers to these rows cannot be scored",
                    fix="rewrite the column, or reward.scorer=NAME for all rows, or "
                    "reward.custom_reward_function.path=FILE.py",
                    where=key,
                    code="R43",
                ),
                stops=True,
            )


def ground_truths(
    rows: Sequence[Row], required: bool, complaint: Callable[[Row, Any], str | None] = lambda row, truth: None
) -> Iterator[Finding]:
    """Report rows without a ground truth, or with one that the scorer cannot read.

    Args:
        required: whether every row needs one (true for built-in scorers; a custom function may not need it).
        complaint: returns the problem with the ground truth of a row, or None.
    """
    tally = Tally(len(rows))
    for row in rows:
        reward = row.values.get("reward_model")
        truth = unwrapped(reward.get("ground_truth")) if isinstance(reward, dict) else None
        if is_missing(truth):
            tally.add(row, _NO_TRUTH if required else _SOME_TRUTH)
        elif reason := complaint(row, truth):
            unread = Problem(
                "R44",
                "the scorer cannot read reward_model.ground_truth",
                "every answer to these rows would count as an error",
                "write it as the scorer expects it",
            )
            tally.add(row, unread, f"{str(truth)[:60]!r}: {reason}")
    if not required and tally.counts.get(_SOME_TRUTH, 0) == len(rows):
        return
    yield from tally.findings()


def is_missing(truth: Any) -> bool:
    """Return whether a ground truth is empty: null, NaN, an empty string or list."""
    return (
        truth is None
        or truth != truth
        or (isinstance(truth, str | list | dict) and not (truth.strip() if isinstance(truth, str) else truth))
    )
