"""Where metrics go: the terminal, metrics.jsonl, TensorBoard, wandb, mlflow, behind one interface.

>>> trackers = build_trackers(["console"], run_dir=run, project="hone", experiment="demo",     # doctest: +SKIP
...                           config_yaml=text, total_steps=100)
>>> trackers.log(1, {"critic/rewards/mean": 0.5})                                              # doctest: +SKIP
>>> trackers.finish("finished")                                                                # doctest: +SKIP
"""

from hone.insight.trackers import console, jsonl, mlflow, tensorboard, wandb
from hone.insight.trackers.base import TRACKERS, CompositeTracker, RunInfo, Tracker, build_trackers

__all__ = [
    *("TRACKERS", "CompositeTracker", "RunInfo", "Tracker", "build_trackers"),
    *("console", "jsonl", "mlflow", "tensorboard", "wandb"),
]
