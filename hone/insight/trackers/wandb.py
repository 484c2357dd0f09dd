"""Weights & Biases. ``WANDB_MODE=offline`` writes to ``<run>/wandb`` without a network or an account."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.insight.detectors import render_alert
from hone.insight.trackers.base import TRACKERS, RunInfo, Tracker, require
from hone.insight.trackers.shown import COLUMNS, Rollouts


@TRACKERS.register("wandb")
class WandbTracker(Tracker):
    """One wandb run per run directory; a resumed run continues it.

    wandb keeps the first value of a step: after a kill, the steps between the checkpoint and the kill show the numbers
    of the killed process. ``metrics.jsonl`` shows those of the resumed one.
    """

    def __init__(self, info: RunInfo) -> None:
        self._wandb = wandb = require("wandb", tracker="wandb")
        self._last = info.run_dir.last_step or 0
        identity = info.run_dir.tracker_id("wandb") or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=info.project,
            name=info.experiment,
            id=identity,
            resume="allow",
            dir=str(info.run_dir.path),
            config=info.config(),
        )
        info.run_dir.set_tracker_id("wandb", identity)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last = step
        self._run.log(dict(metrics), step=step)

    def rollouts(self, rollouts: Rollouts) -> None:
        """Log a table ``samples/rollouts`` or ``samples/validation``, at the last step: wandb takes no earlier one."""
        table = self._wandb.Table(columns=list(COLUMNS), data=rollouts.rows())
        self._run.log({f"samples/{rollouts.kind}": table}, step=self._last)

    def alert(self, step: int, alert: Mapping[str, Any]) -> None:
        level = getattr(self._wandb.AlertLevel, "ERROR" if alert["severity"] == "error" else "WARN")
        text = render_alert({"step": step, **alert})
        self._run.alert(title=f"{alert['detector']}, step {step}", text=text, level=level)

    def picture(self, file: Path) -> None:
        self._run.log({"curves": self._wandb.Image(str(file))}, step=self._last)

    def finish(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("finished", "interrupted") else 1)
