"""Trackers of metrics with one interface: metrics.jsonl, the terminal, TensorBoard, wandb, mlflow, trackio, swanlab, OpenTelemetry.

>>> trackers = build_trackers(["console"], run_dir=run, project="hone", experiment="demo",     # doctest: +SKIP
...                           config_yaml=text, total_steps=100)
>>> trackers.log(1, {"critic/rewards/mean": 0.5})                                              # doctest: +SKIP
>>> trackers.finish("finished")                                                                # doctest: +SKIP
"""

from hone.insight.trackers.base import TRACKERS, CompositeTracker, JsonlTracker, RunInfo, Tracker, build_trackers
from hone.insight.trackers.console import ConsoleTracker
from hone.insight.trackers.mlflow import MlflowTracker
from hone.insight.trackers.otel import OtelTracker
from hone.insight.trackers.shown import Rollouts
from hone.insight.trackers.swanlab import SwanLabTracker
from hone.insight.trackers.tensorboard import TensorBoardTracker
from hone.insight.trackers.trackio import TrackioTracker
from hone.insight.trackers.wandb import WandbTracker

__all__ = [
    "TRACKERS",
    "CompositeTracker",
    "ConsoleTracker",
    "JsonlTracker",
    "MlflowTracker",
    "OtelTracker",
    "Rollouts",
    "RunInfo",
    "SwanLabTracker",
    "TensorBoardTracker",
    "Tracker",
    "TrackioTracker",
    "WandbTracker",
    "build_trackers",
]
