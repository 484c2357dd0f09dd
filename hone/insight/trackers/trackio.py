"""Trackio, the local tracker of Hugging Face. It keeps all projects in one folder, ``TRACKIO_DIR``; ``trackio show`` opens them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.insight.detectors import render_alert
from hone.insight.trackers.base import TRACKERS, RunInfo, Tracker, require
from hone.insight.trackers.shown import COLUMNS, Rollouts


@TRACKERS.register("trackio")
class TrackioTracker(Tracker):
    """One run of Trackio per run directory; a resumed run continues it.

    Trackio keeps every value of a step: after a kill, the steps between the checkpoint and the kill have those of both processes.
    """

    def __init__(self, info: RunInfo) -> None:
        self._trackio = trackio = require("trackio", tracker="trackio")
        self._last = info.run_dir.last_step or 0
        name = info.run_dir.tracker_id("trackio") or f"{info.experiment}-{uuid.uuid4().hex[:6]}"
        self._run = trackio.init(
            project=info.project,
            name=name,
            config=info.config(),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        info.run_dir.set_tracker_id("trackio", name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last = step
        self._run.log(dict(metrics), step=step)

    def rollouts(self, rollouts: Rollouts) -> None:
        table = self._trackio.Table(columns=list(COLUMNS), data=rollouts.rows())
        self._run.log({f"samples/{rollouts.kind}": table}, step=rollouts.step)

    def alert(self, step: int, alert: Mapping[str, Any]) -> None:
        level = getattr(self._trackio.AlertLevel, "ERROR" if alert["severity"] == "error" else "WARN")
        text = render_alert({"step": step, **alert})
        self._run.alert(title=f"{alert['detector']}, step {step}", text=text, level=level, step=step)

    def picture(self, file: Path) -> None:
        self._run.log({"curves": self._trackio.Image(str(file))}, step=self._last)

    def finish(self, status: str) -> None:
        del status
        self._run.finish()
