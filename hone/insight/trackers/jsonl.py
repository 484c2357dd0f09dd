"""Record of the run: ``metrics.jsonl`` in the run directory."""

from __future__ import annotations

from collections.abc import Mapping

from hone.insight.trackers.base import TRACKERS, RunInfo, Tracker


@TRACKERS.register("jsonl")
class JsonlTracker(Tracker):
    """Append one line per call; always on. A metric that its step has already is refused."""

    def __init__(self, info: RunInfo) -> None:
        self._run_dir = info.run_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line of a step."""
        self._run_dir.log_metrics(step, metrics)

    def finish(self, status: str) -> None:
        """Close the file."""
        del status
        self._run_dir.close()
