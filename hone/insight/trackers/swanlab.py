"""SwanLab. ``SWANLAB_MODE=offline`` writes to ``<run>/swanlog`` without a network or an account; ``swanlab sync`` uploads it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.insight.detectors import render_alert
from hone.insight.trackers.base import TRACKERS, RunInfo, Tracker, require
from hone.insight.trackers.shown import COLUMNS, Rollouts


@TRACKERS.register("swanlab")
class SwanLabTracker(Tracker):
    """One experiment of SwanLab per run directory; a resumed run continues it.

    SwanLab keeps the first value of a step, so after a kill some steps show the numbers of the killed process.
    """

    def __init__(self, info: RunInfo) -> None:
        self._swanlab = swanlab = require("swanlab", tracker="swanlab")
        self._last = info.run_dir.last_step or 0
        identity = info.run_dir.tracker_id("swanlab") or uuid.uuid4().hex[:21]  # the length that SwanLab requires
        self._run = swanlab.init(
            project=info.project,
            name=info.experiment,
            config=info.config(),
            log_dir=str(info.run_dir.path / "swanlog"),
            id=identity,
            resume="allow",
        )
        info.run_dir.set_tracker_id("swanlab", identity)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last = step
        self._run.log(dict(metrics), step=step)

    def rollouts(self, rollouts: Rollouts) -> None:
        table = self._swanlab.echarts.Table()
        table.add(list(COLUMNS), [["" if value is None else value for value in row] for row in rollouts.rows()])
        self._run.log({f"samples/{rollouts.kind}": table}, step=rollouts.step)

    def alert(self, step: int, alert: Mapping[str, Any]) -> None:
        text = self._swanlab.Text(render_alert({"step": step, **alert}), caption=alert["severity"])
        self._run.log({f"alerts/{alert['detector']}": text}, step=step)

    def picture(self, file: Path) -> None:
        self._run.log({"curves": self._swanlab.Image(str(file))}, step=self._last)

    def finish(self, status: str) -> None:
        states = {"finished": "success", "interrupted": "aborted"}
        self._swanlab.finish(states.get(status, "crashed"))
