"""Trackers of metrics with one interface: metrics.jsonl, the terminal, TensorBoard, wandb, mlflow, trackio, swanlab, OpenTelemetry.

>>> trackers = build_trackers(["console"], run_dir=run, project="hone", experiment="demo",     # doctest: +SKIP
...                           config_yaml=text, total_steps=100)
>>> trackers.log(1, {"critic/rewards/mean": 0.5})                                              # doctest: +SKIP
>>> trackers.finish("finished")                                                                # doctest: +SKIP
"""

from hone.insight.trackers.base import TRACKERS, RunInfo, Tracker, build_trackers

__all__ = ["TRACKERS", "RunInfo", "Tracker", "build_trackers"]

for _name in ("console", "mlflow", "otel", "tensorboard"):
    TRACKERS.register_later(f"hone.insight.trackers.{_name}", _name)
TRACKERS.register_later("hone.insight.trackers.services", "swanlab", "trackio", "wandb")
