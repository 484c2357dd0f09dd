"""Trackers of services with the interface of wandb.

Weights & Biases: ``WANDB_MODE=offline`` writes to ``<run>/wandb`` without a network or an account. SwanLab: ``SWANLAB_MODE=offline``
writes to ``<run>/swanlog``; ``swanlab sync`` uploads it. Trackio, the local tracker of Hugging Face, keeps all projects in one folder,
``TRACKIO_DIR``; ``trackio show`` opens them.
"""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hone.insight.detectors import render_alert
from hone.insight.trackers.base import COLUMNS, TRACKERS, Rollouts, RunInfo, Tracker, require


class ServiceTracker(Tracker):
    """One run of the service per run directory; a resumed run continues it."""

    name: ClassVar[str]
    dates_alerts: ClassVar[bool] = False  # whether an alert has a step
    goes_back: ClassVar[bool] = True  # whether an earlier step than the last can be logged

    def __init__(self, info: RunInfo) -> None:
        self._service: Any = require(self.name, tracker=self.name)
        self._last = info.run_dir.last_step or 0
        identity = info.run_dir.tracker_id(self.name) or self.new_identity(info)
        options = {"project": info.project, "config": info.config(), "resume": "allow", **self.options(info, identity)}
        self._run: Any = self._service.init(**options)
        info.run_dir.set_tracker_id(self.name, identity)

    @abstractmethod
    def new_identity(self, info: RunInfo) -> str:
        """Return the identity of a new run."""

    @abstractmethod
    def options(self, info: RunInfo, identity: str) -> dict[str, Any]:
        """Return the arguments by which the service begins or continues a run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last = step
        self._run.log(dict(metrics), step=step)

    def rollouts(self, rollouts: Rollouts) -> None:
        """Log a table ``samples/rollouts`` or ``samples/validation``."""
        table = self._service.Table(columns=list(COLUMNS), data=rollouts.rows())
        self._run.log({f"samples/{rollouts.kind}": table}, step=rollouts.step if self.goes_back else self._last)

    def alert(self, step: int, alert: Mapping[str, Any]) -> None:
        level = getattr(self._service.AlertLevel, "ERROR" if alert["severity"] == "error" else "WARN")
        title, text = f"{alert['detector']}, step {step}", render_alert({"step": step, **alert})
        self._run.alert(title=title, text=text, level=level, **({"step": step} if self.dates_alerts else {}))

    def picture(self, file: Path) -> None:
        self._run.log({"curves": self._service.Image(str(file))}, step=self._last)

    def finish(self, status: str) -> None:
        del status
        self._run.finish()


@TRACKERS.register("wandb")
class WandbTracker(ServiceTracker):
    """Weights & Biases.

    wandb keeps the first value of a step: after a kill, the steps between the checkpoint and the kill show the numbers
    of the killed process. ``metrics.jsonl`` shows those of the resumed one.
    """

    name = "wandb"
    goes_back = False

    def new_identity(self, info: RunInfo) -> str:
        return uuid.uuid4().hex[:12]

    def options(self, info: RunInfo, identity: str) -> dict[str, Any]:
        return {"name": info.experiment, "id": identity, "dir": str(info.run_dir.path)}

    def finish(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("finished", "interrupted") else 1)


@TRACKERS.register("trackio")
class TrackioTracker(ServiceTracker):
    """Trackio.

    Trackio keeps every value of a step: after a kill, the steps between the checkpoint and the kill have those of both processes.
    """

    name = "trackio"
    dates_alerts = True

    def new_identity(self, info: RunInfo) -> str:
        return f"{info.experiment}-{uuid.uuid4().hex[:6]}"

    def options(self, info: RunInfo, identity: str) -> dict[str, Any]:
        return {"name": identity, "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}


@TRACKERS.register("swanlab")
class SwanLabTracker(ServiceTracker):
    """SwanLab.

    SwanLab keeps the first value of a step, so after a kill some steps show the numbers of the killed process.
    """

    name = "swanlab"

    def new_identity(self, info: RunInfo) -> str:
        return uuid.uuid4().hex[:21]  # the length that SwanLab requires

    def options(self, info: RunInfo, identity: str) -> dict[str, Any]:
        return {"name": info.experiment, "id": identity, "log_dir": str(info.run_dir.path / "swanlog")}

    def rollouts(self, rollouts: Rollouts) -> None:
        table = self._service.echarts.Table()
        table.add(list(COLUMNS), [["" if value is None else value for value in row] for row in rollouts.rows()])
        self._run.log({f"samples/{rollouts.kind}": table}, step=rollouts.step)

    def alert(self, step: int, alert: Mapping[str, Any]) -> None:
        text = self._service.Text(render_alert({"step": step, **alert}), caption=alert["severity"])
        self._run.log({f"alerts/{alert['detector']}": text}, step=step)

    def finish(self, status: str) -> None:
        states = {"finished": "success", "interrupted": "aborted"}
        self._service.finish(states.get(status, "crashed"))
