"""Weights & Biases. ``WANDB_MODE=offline`` writes to ``<run>/wandb`` without a network or an account."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from hone.insight.trackers.base import TRACKERS, RunInfo, require


@TRACKERS.register("wandb")
class WandbTracker:
    """One wandb run per run directory; a resumed run continues it.

    wandb keeps the first value of a step: after a kill, the steps between the checkpoint and the kill show the numbers
    of the killed process. ``metrics.jsonl`` shows those of the resumed one.
    """

    def __init__(self, info: RunInfo) -> None:
        wandb = require("wandb", tracker="wandb")
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
        """Log all metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def finish(self, status: str) -> None:
        """Upload remaining data and close; any status but ``finished`` and ``interrupted`` marks the run as failed."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("finished", "interrupted") else 1)
