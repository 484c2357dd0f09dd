"""TensorBoard event files in ``<run>/tensorboard``: scalars, hyperparameters, rollouts as tables, alerts, and the curves."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hone.insight.detectors import render_alert
from hone.insight.trackers.base import COLUMNS, TRACKERS, Rollouts, RunInfo, Tracker, require

_RESULTS = ("critic/rewards/mean", "train/loss", "rewards/accuracies", "val/loss", "val/rewards/accuracies")
"""Metrics that the page of hyperparameters compares, with those of the first validation."""


@TRACKERS.register("tensorboard")
class TensorBoardTracker(Tracker):
    """Write scalars, text and hyperparameters. After a resume, TensorBoard hides values after the checkpoint."""

    def __init__(self, info: RunInfo) -> None:
        require("tensorboard", tracker="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._info, last = info, info.run_dir.last_step
        self._writer = SummaryWriter(
            log_dir=str(info.run_dir.path / "tensorboard"), purge_step=None if last is None else last + 1
        )
        self._last = last or 0
        self._described = last is not None
        if last is None:
            self._writer.add_text("config", "\n".join(f"    {line}" for line in _dump(info).splitlines()), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric; the first call also writes the hyperparameters."""
        self._last = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        if not self._described:
            self._described = True
            self._write_hyperparameters(metrics)

    def rollouts(self, rollouts: Rollouts) -> None:
        self._writer.add_text(f"samples/{rollouts.kind}", markdown_table(rollouts), rollouts.step)

    def alert(self, step: int, alert: Mapping[str, Any]) -> None:
        text = html.escape(render_alert({"step": step, **alert})).replace("\n", "  \n")
        self._writer.add_text(f"alerts/{alert['detector']}", text, step)

    def picture(self, file: Path) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        png = file.read_bytes()
        width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))  # of the header chunk
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        self._writer.file_writer.add_summary(  # type: ignore[union-attr]
            Summary(value=[Summary.Value(tag="curves", image=image)]), self._last
        )

    def finish(self, status: str) -> None:
        del status
        self._writer.close()

    def _write_hyperparameters(self, metrics: Mapping[str, float]) -> None:
        """Write the data of the hparams plugin; of several entries in one file it reads the first."""
        from torch.utils.tensorboard.summary import hparams

        values = dict(_leaves(self._info.config()))
        results = dict.fromkeys([*_RESULTS, *(name for name in metrics if name.startswith("val-core/"))], 0.0)
        for summary in hparams(values, results):
            self._writer.file_writer.add_summary(summary)  # type: ignore[union-attr]


def markdown_table(rollouts: Rollouts) -> str:
    """Return sampled rollouts as a Markdown table, with the number of sequences below it.

    >>> print(markdown_table(Rollouts("rollouts", 1, [], 0, 0.0)))
    | step | uid | index | prompt | answer | expected | score | terms | advantage | end |
    |---|---|---|---|---|---|---|---|---|---|
    <BLANKLINE>
    0 of 0 samples
    """
    rows = rollouts.rows()
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows]
    return "\n".join([*lines, "", f"{len(rows)} of {rollouts.total} samples"])


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Yield the values of a config by dotted key: numbers and truth values unchanged, anything else but null as text."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value if isinstance(value, bool | int | float) else str(value)


def _dump(info: RunInfo) -> str:
    import yaml

    return yaml.safe_dump(info.config(), sort_keys=False, allow_unicode=True)
