"""Watch over a run: all detectors read each step, and their alerts are logged, stored and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.insight.archive.read import open_archive
from hone.insight.detectors import DETECTORS, Alert, Detector, build_detectors, render_alert
from hone.insight.detectors.base import Settings
from hone.insight.metrics import is_timing
from hone.insight.run_directory import RunDirectory

log = logging.getLogger("hone")

TIMED = frozenset(detector.name for detector in DETECTORS if all(map(is_timing, detector.reads)))
"""Names of the detectors of wall time and memory, whose alerts differ between two runs of one seed."""
SAMPLES = 5  # samples that an alert names


class Watch:
    """Detectors of one run. Their state belongs to a checkpoint, so a resumed run gives the alerts of an undisturbed one.

    Args:
        directory: run directory; alerts go to its ``alerts.jsonl``, and their counts to ``run.json``.
        stop_on: names of detectors whose alert ends the run.

    Attributes:
        stopped_by: alert that ends the run, None while there is none.
    """

    def __init__(
        self, directory: RunDirectory, settings: Settings, *, ignore: Iterable[str] = (), stop_on: Iterable[str] = ()
    ) -> None:
        self._directory, self._stop_on = directory, frozenset(stop_on)
        self._detectors = build_detectors(settings, ignore)
        self._validation: dict[str, float] = {}
        self.stopped_by: Alert | None = None

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alert]:
        """Read the metrics of a step, log and store its alerts, and return them."""
        seen = {**self._validation, **metrics}
        self._validation = {}
        alerts = [
            replace(alert, samples=concerned_samples(self._directory.path, step, detector))
            for detector in self._detectors
            if (alert := detector.observe(step, seen)) is not None
        ]
        if alerts:
            self._directory.add_alerts(step, [alert.record() for alert in alerts])
        for alert in alerts:
            log.warning("%s", render_alert({"step": step, **alert.record()}, str(self._directory.path)))
            if alert.detector in self._stop_on and self.stopped_by is None:
                self.stopped_by = alert
        return alerts

    def state(self) -> dict[str, Any]:
        """Return what the detectors have seen as values of JSON, for a checkpoint; the one that ends the run starts over."""
        ending = self.stopped_by and self.stopped_by.detector
        seen = {detector.name: detector.state() for detector in self._detectors if detector.name != ending}
        return {"seen": seen, "validation": self._validation}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`; a detector that it lacks starts over."""
        self._validation = dict(state["validation"])
        for detector in self._detectors:
            detector.restore(state["seen"].get(detector.name, {}))

    def add_validation(self, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a validation that ended after its step; the next step is read with them."""
        self._validation |= metrics


def diagnose_run(run: Path, rows: Iterable[Mapping[str, float]], settings: Settings) -> list[Alert]:
    """Return the alerts that all detectors give for a run, with samples of its archive. ``rows``: metrics by step, in
    order, each with its ``step``.
    """
    detectors = build_detectors(settings)
    return [
        replace(alert, samples=concerned_samples(run, alert.step, detector))
        for row in rows
        for detector in detectors
        if (alert := detector.observe(int(row["step"]), row)) is not None
    ]


def concerned_samples(run: Path, step: int, detector: Detector) -> tuple[dict[str, Any], ...]:
    """Return step, uid and index of the samples that illustrate a detector's symptom best. ``step``: step of the
    symptom; the nearest step in the archive is read.
    """
    try:
        archive = open_archive(run)
        steps = archive.steps()
        if not steps:
            return ()
        nearest = min(steps, key=lambda stored: abs(stored - step))
        records = [
            record
            for record in archive.records(nearest, ("uid", "index", "fate", *detector.columns))
            if record["fate"] == "trained"
        ]
    except HoneError as error:
        log.warning("the samples of the alert cannot be read: %s", error.what)
        return ()
    records.sort(key=detector.concern, reverse=True)
    return tuple({"step": nearest, "uid": record["uid"], "index": record["index"]} for record in records[:SAMPLES])
