"""TensorBoard event files in ``<run>/tensorboard``: scalars, the config, its hyperparameters, and samples as tables."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hone.insight.archive.read import open_archive
from hone.insight.records import shown_score
from hone.insight.samples import SampleQuery, read_samples
from hone.insight.trackers.base import TRACKERS, RunInfo, require

SHOWN = 8
"""Samples of a table."""
_LONGEST = 1500
"""Characters of a cell."""
_RESULTS = ("critic/rewards/mean", "train/loss", "rewards/accuracies", "val/loss", "val/rewards/accuracies")
"""Metrics that the page of hyperparameters compares, with those of the first validation."""


@TRACKERS.register("tensorboard")
class TensorBoardTracker:
    """Write scalars, text and hyperparameters. After a resume, TensorBoard hides values after the checkpoint."""

    def __init__(self, info: RunInfo) -> None:
        require("tensorboard", tracker="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._info, last = info, info.run_dir.last_step
        self._writer = SummaryWriter(
            log_dir=str(info.run_dir.path / "tensorboard"), purge_step=None if last is None else last + 1
        )
        archives = [open_archive(folder) for folder in (info.run_dir.rollouts, info.run_dir.validation)]
        self._samples = [(archive, set(archive.steps())) for archive in archives]
        self._described = last is not None
        if last is None:
            self._writer.add_text("config", "\n".join(f"    {line}" for line in _dump(info).splitlines()), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric, and the samples that the run has written since the last call."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        if not self._described:
            self._described = True
            self._write_hyperparameters(metrics)
        self._write_samples()

    def finish(self, status: str) -> None:
        """Flush and close."""
        del status
        self._write_samples()
        self._writer.close()

    def _write_samples(self) -> None:
        """Write samples of the steps whose file has appeared; it may be written after the step is logged."""
        for archive, written in self._samples:
            for step in archive.steps():
                if step not in written:
                    written.add(step)
                    self._writer.add_text(f"samples/{archive.folder.name}", samples_table(archive.folder, step), step)

    def _write_hyperparameters(self, metrics: Mapping[str, float]) -> None:
        """Write the data of the hparams plugin; of several entries in one file it reads the first."""
        from torch.utils.tensorboard.summary import hparams

        values = dict(_leaves(self._info.config()))
        results = dict.fromkeys([*_RESULTS, *(name for name in metrics if name.startswith("val-core/"))], 0.0)
        for summary in hparams(values, results):
            self._writer.file_writer.add_summary(summary)  # type: ignore[union-attr]


def samples_table(folder: Path, step: int) -> str:
    """Return some samples of a step as a Markdown table."""
    samples = read_samples(folder, SampleQuery(step, limit=SHOWN))
    rows = [
        [record.get("prompt") or "", record["text"], str(record["ground_truth"]), shown_score(record)]
        for record in samples.shown
    ]
    lines = ["| prompt | answer | expected | score |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(_cell(text) for text in row)} |" for row in rows]
    return "\n".join([*lines, "", f"{len(rows)} of {samples.total} samples"])


def _cell(text: str) -> str:
    """Return a text for a cell of a Markdown table, shortened in the middle."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
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
