"""Material that trackers show besides metrics: sampled rollouts of a step, and the picture of the curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.insight.archive.read import Archive, open_archive, table_records
from hone.insight.curves import draw_png, points
from hone.insight.run_directory import RunDirectory
from hone.insight.run_files import read_metrics

COLUMNS = ("step", "uid", "index", "prompt", "answer", "expected", "score", "terms", "advantage", "end")
"""Columns of a table of rollouts."""
_READ = (
    "step", "uid", "index", "part", "fate", "prompt", "messages", "text", "ground_truth", "stop_reason", "seconds",
    "score", "terms", "error", "episode", "loss_mask", "advantages",
)  # fmt: skip
_LONGEST = 1500  # characters of a cell
_CURVES = (
    "critic/rewards/mean", "train/loss", "actor/pg_loss", "actor/kl_loss", "actor/ppo_kl", "actor/entropy",
    "actor/grad_norm", "response_length/mean", "rewards/accuracies", "val/loss", "val/rewards/accuracies",
)  # fmt: skip
"""Metrics of the picture of the curves, with those of validations."""


@dataclass(frozen=True)
class Rollouts:
    """Some sequences of a step, spread evenly over the archive's file."""

    kind: str  # ``rollouts`` or ``validation``
    step: int
    records: list[dict[str, Any]]  # the sequences, as the archive has them; credentials are hidden there already
    total: int  # number of sequences in the file
    written: float  # time at which the file was written, in seconds since 1970

    def rows(self) -> list[list[Any]]:
        """Return one row per sequence with the values of :data:`COLUMNS`; long texts are cut in the middle."""
        return [_row(record) for record in self.records]


class NewRollouts:
    """Sampled rollouts of the steps whose file appears in the archive after the start of the process. ``limit``:
    largest number of sequences of a step; None for all in the file, 0 for none.
    """

    def __init__(self, directory: RunDirectory, limit: int | None) -> None:
        self._limit = limit
        archives = [open_archive(folder) for folder in (directory.rollouts, directory.validation)]
        self._read = [(archive, set(archive.steps())) for archive in archives]

    def take(self) -> Iterator[Rollouts]:
        """Yield the rollouts of every file that no earlier call gave; a file may appear after its step is logged."""
        for archive, read in self._read if self._limit != 0 else ():
            for step in archive.steps():
                if step not in read:
                    read.add(step)
                    yield read_rollouts(archive, step, self._limit)


def read_rollouts(archive: Archive, step: int, limit: int | None = None) -> Rollouts:
    """Return at most ``limit`` sequences of a step at even distances, the first included.

    Raises HoneError: the step has no file, or the file cannot be read (code E-runs).
    """
    table = archive.table(step, _READ)
    count = len(table) if limit is None else min(limit, len(table))
    chosen = table.take([number * len(table) // count for number in range(count)])
    written = (archive.folder / f"step_{step}.parquet").stat().st_mtime
    return Rollouts(archive.folder.name, step, list(table_records(chosen)), len(table), written)


def mean_advantage(record: Mapping[str, Any]) -> float | None:
    """Return the mean advantage over the tokens that the update learned from; None if there is none."""
    advantages = record["advantages"]
    if not advantages:
        return None
    mask = record["loss_mask"] or [1] * len(advantages)
    learned = [value for value, counts in zip(advantages, mask, strict=True) if counts]
    return sum(learned) / len(learned) if learned else None


def ending(record: Mapping[str, Any]) -> str:
    return (record["episode"] or {}).get("end") or record["stop_reason"] or ""


def prompt_of(record: Mapping[str, Any]) -> str:
    """Return the prompt as text; its messages as JSON if the archive has no text."""
    if record["prompt"] is not None:
        return record["prompt"]
    return json.dumps(record["messages"], ensure_ascii=False) if record["messages"] else ""


def shortened(text: str, longest: int = _LONGEST) -> str:
    """Return a text, cut in the middle if it has more than ``longest`` characters.

    >>> shortened("abcdefghij", 4)
    'ab ... ij'
    """
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def _row(record: Mapping[str, Any]) -> list[Any]:
    terms = ", ".join(f"{name} {value:g}" for name, value in (record["terms"] or {}).items())
    expected = record["ground_truth"]
    expected = expected if isinstance(expected, str) else "" if expected is None else json.dumps(expected)
    texts = [shortened(text) for text in (prompt_of(record), record["text"], expected)]
    identity = [record["step"], record["uid"], record["index"]]
    return [*identity, *texts, record["score"], terms, mean_advantage(record), ending(record)]


def draw_curves(directory: RunDirectory, file: Path, title: str) -> Path | None:
    """Draw the main curves of a run as a PNG; None if no metric has two steps."""
    metrics = read_metrics(directory.path)
    validations = sorted({name for row in metrics for name in row if name.startswith("val-core/")})
    curves = {name: points(metrics, name) for name in (*_CURVES, *validations)}
    panels = {name: {title: curve} for name, curve in curves.items() if len(curve) > 1}
    return draw_png(file, panels, title=title) if panels else None
