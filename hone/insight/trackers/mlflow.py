"""MLflow tracker. ``MLFLOW_TRACKING_URI`` names the server or database; without it, a file store in ``<run>/mlruns``.

MLflow requires explicit consent for file stores, the only kind that the light package ``mlflow-skinny`` can write alone;
the tracker sets it. To view one: ``MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri <run>/mlruns``.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hone.insight.detectors import render_alert
from hone.insight.trackers.base import COLUMNS, TRACKERS, Rollouts, RunInfo, Tracker, require

_BATCH = 1000  # limit of metrics, and _PARAMS of parameters, in one MLflow request
_PARAMS = 100
_LONGEST_VALUE = 6000
_TABLES = "mlflow.loggedArtifacts"  # tag of a run that names its tables, so that MLflow shows them as such


@TRACKERS.register("mlflow")
class MlflowTracker(Tracker):
    """One MLflow run per run directory; a resumed run continues it. :func:`metric_key` rewrites names that MLflow forbids."""

    def __init__(self, info: RunInfo) -> None:
        mlflow = require("mlflow", tracker="mlflow")
        self._entities = mlflow.entities
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (info.run_dir.path.absolute() / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        identity = info.run_dir.tracker_id("mlflow")
        if identity is None:
            experiment = self._client.get_experiment_by_name(info.project)
            number = experiment.experiment_id if experiment else self._client.create_experiment(info.project)
            identity = self._client.create_run(number, run_name=info.experiment).info.run_id
            params = [mlflow.entities.Param(name, value) for name, value in _flatten(info.config())]
            for start in range(0, len(params), _PARAMS):
                self._client.log_batch(identity, params=params[start : start + _PARAMS])
            info.run_dir.set_tracker_id("mlflow", identity)
        else:
            self._client.set_terminated(identity, status="RUNNING")
        self._identity = identity

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        entries = [self._entities.Metric(metric_key(name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(entries), _BATCH):
            self._client.log_batch(self._identity, metrics=entries[start : start + _BATCH])

    def rollouts(self, rollouts: Rollouts) -> None:
        """Store a table ``samples/<kind>_step_<N>.json``, in the form that MLflow shows as a table."""
        file = f"samples/{rollouts.kind}_step_{rollouts.step}.json"
        self._client.log_dict(self._identity, {"columns": list(COLUMNS), "data": rollouts.rows()}, file)
        stored = json.loads(self._client.get_run(self._identity).data.tags.get(_TABLES, "[]"))
        if (entry := {"path": file, "type": "table"}) not in stored:
            self._client.set_tag(self._identity, _TABLES, json.dumps([*stored, entry]))

    def alert(self, step: int, alert: Mapping[str, Any]) -> None:
        text = render_alert({"step": step, **alert})[:_LONGEST_VALUE]
        self._client.set_tag(self._identity, f"alert.{alert['detector']}", text)

    def picture(self, file: Path) -> None:
        self._client.log_artifact(self._identity, str(file))

    def finish(self, status: str) -> None:
        states = {"finished": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self._identity, status=states.get(status, "FAILED"))


def metric_key(name: str) -> str:
    """Return a metric name in the characters that MLflow allows.

    >>> metric_key("val-core/openai/gsm8k/acc/mean@4")
    'val-core/openai/gsm8k/acc/mean_at_4'
    """
    return re.sub(r"[^\w\-. /]", "_", re.sub(r"/{2,}", "/", name.replace("@", "_at_")))


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield metric_key(prefix), str(tree)[:_LONGEST_VALUE]
