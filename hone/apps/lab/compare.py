"""Find runs, summarise them, and compare them."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from hone.config.environment import flatten
from hone.config.load import differences
from hone.errors import HoneError, did_you_mean
from hone.insight.curves import points
from hone.insight.run_files import CONFIG, RUN, read_metrics, read_run
from hone.text import read_yaml

ABSENT = "(absent)"
_DEPTH = 4  # levels of folders below the root that are searched for runs
_MORE_IS_BETTER = ("val-core/", "val-aux/", "critic/rewards/", "critic/score/", "reward/", "perf/throughput")
_LESS_IS_BETTER = (
    "train/loss", "val/loss", "critic/vf_loss",
    "reward/no_verdict_rate", "training/no_verdict_groups", "val-aux/no_verdict_rate",
    "reward/zero_std_group_ratio", "timing_s/", "perf/time_per_step",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run read from its directory."""

    name: str  # its path below the root
    path: Path  # its directory
    record: Mapping[str, Any]  # contents of ``run.json``
    metrics: Sequence[Mapping[str, float]]  # rows of ``metrics.jsonl``
    config: Mapping[str, Any]  # ``config.yaml``, flat: dotted key to value

    @property
    def status(self) -> str:
        """Return the recorded status; ``dead`` if it is ``running`` but the process, on this machine, does not exist."""
        status = str(self.record.get("status", "unknown"))
        here, pid = self.record.get("host") == platform.node(), self.record.get("pid")
        gone = here and isinstance(pid, int) and not psutil.pid_exists(pid)
        return "dead" if status == "running" and gone else status

    @property
    def steps(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def seconds(self) -> float | None:
        """Return the seconds from the first start to the end, or to now for a live run; None if unknown."""
        try:
            started = datetime.datetime.fromisoformat(self.record["started"])
            ended = self.record.get("ended")
            if ended is None and self.status != "running":
                return None
            end = datetime.datetime.fromisoformat(ended) if ended else datetime.datetime.now(datetime.UTC)
        except (KeyError, TypeError, ValueError):
            return None
        return (end - started).total_seconds()

    def names(self) -> list[str]:
        """Return the names of all metrics of the run, sorted."""
        return sorted({name for row in self.metrics for name in row} - {"step"})

    def last(self, metric: str) -> float | None:
        """Return the latest value of a metric, None if it has none."""
        curve = points(self.metrics, metric)
        return curve[-1][1] if curve else None


def read_whole_run(path: Path, name: str = "") -> Run:
    config = path / CONFIG
    try:
        tree = read_yaml(config.read_text(encoding="utf-8")) if config.is_file() else {}
        record, metrics = read_run(path), read_metrics(path)
        if not isinstance(record, dict) or not isinstance(tree, dict | None):
            raise TypeError("it is not an object")
        return Run(name or path.name, path, record, metrics, dict(flatten(tree)))
    except yaml.YAMLError as error:
        raise HoneError(f"the file is not YAML: {error}", where=str(config), fix="restore the file") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise HoneError(
            f"a file of the run is damaged: {error}", where=str(path), fix="restore or remove it", code="E-runs"
        ) from None


def whole_runs(paths: Mapping[str, Path]) -> Iterator[Run]:
    """Read run directories; one that is damaged has the status ``damaged``, and its reason."""
    for name, path in paths.items():
        try:
            yield read_whole_run(path, name)
        except HoneError as error:
            yield Run(name, path, {"status": "damaged", "exit_reason": error.what}, [], {})


def run_names(root: Path) -> dict[str, Path]:
    """Return every run below ``root``, by its path relative to it, oldest first."""

    def search(folder: Path, depth: int) -> Iterator[Path]:
        if (folder / RUN).is_file():
            yield folder
        elif depth:
            for child in sorted(folder.iterdir()):
                if child.is_dir() and not child.name.startswith("."):
                    yield from search(child, depth - 1)

    paths = list(search(root, _DEPTH)) if root.is_dir() else []
    paths.sort(key=lambda folder: ((folder / RUN).stat().st_ctime, str(folder)))
    return {folder.relative_to(root).as_posix() if folder != root else folder.name: folder for folder in paths}


def find_run(wanted: str, root: Path) -> Run:
    """Find a run by its directory, its name below ``root`` (``project/experiment``), or the last part of that name."""
    if (Path(wanted) / RUN).is_file():
        return read_whole_run(Path(wanted), wanted.rstrip("/"))
    paths_by_name = run_names(root)
    if wanted in paths_by_name:
        return read_whole_run(paths_by_name[wanted], wanted)
    fitting = [name for name in paths_by_name if name.rsplit("/", 1)[-1] == wanted]
    if len(fitting) == 1:
        return read_whole_run(paths_by_name[fitting[0]], fitting[0])
    if fitting:
        raise HoneError(
            f"'{wanted}' is the name of {len(fitting)} runs", fix=f"name one of {', '.join(fitting)}", code="E-runs"
        )
    near = (
        did_you_mean(wanted, [*paths_by_name, *(name.rsplit("/", 1)[-1] for name in paths_by_name)])
        if paths_by_name
        else ""
    )
    raise HoneError(
        f"no run '{wanted}' under '{root}', which has {len(paths_by_name)} runs",
        fix=near or "name a run directory, or the folder that holds them with --root",
        code="E-runs",
    )


def config_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the keys whose values differ among the runs, each with one value per run (``(absent)`` where a run has none)."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = {key: [run.config.get(key, ABSENT) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


@dataclass(frozen=True)
class Summary:
    """One metric of one run."""

    count: int  # number of steps that have it
    first: float
    last: float  # latest value
    # largest, or smallest where less is better (losses, error rates, times); None if neither is better, as for KL
    best: float | None
    best_step: int | None  # first step with the best value


def summarise(run: Run, metric: str) -> Summary | None:
    """Return first, last and best value of a metric; None if the run has none."""
    curve = points(run.metrics, metric)
    if not curve:
        return None
    finite = [(step, value) for step, value in curve if math.isfinite(value)] or curve
    best: tuple[float | None, float | None] = (None, None)
    if less_is_better(metric):
        best = min(finite, key=lambda point: point[1])
    elif metric.startswith(_MORE_IS_BETTER):
        best = max(finite, key=lambda point: point[1])
    return Summary(len(curve), curve[0][1], curve[-1][1], best[1], None if best[0] is None else int(best[0]))


def less_is_better(metric: str) -> bool:
    """Return whether smaller values of a metric are better: losses, error rates, times."""
    return metric.startswith(_LESS_IS_BETTER)


def headline_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the most important metrics that any run has: validation, reward, loss, KL, length, entropy."""
    have = dict.fromkeys(name for run in runs for name in run.names())
    headline = [name for name in have if name.startswith("val-core/")]
    fixed = (
        "critic/rewards/mean", "train/loss", "val/loss", "actor/kl_loss", "actor/ppo_kl", "actor/entropy",
        "actor/grad_norm", "response_length/mean", "perf/throughput",
    )  # fmt: skip
    return headline + [name for name in fixed if name in have]


def require_metrics(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Check that every requested metric is in one of the runs."""
    have = sorted({name for run in runs for name in run.names()})
    for name in names:
        if name not in have:
            raise HoneError(
                f"no metric '{name}' in {', '.join(run.name for run in runs)}",
                fix=did_you_mean(name, have),
                code="E-runs",
            )
    return list(names)


SEED = "trainer.seed"
IDENTITY_KEYS = (
    "trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name", "trainer.logger",
    "trainer.checkpoint_dir", "trainer.resume_", "trainer.save_freq", "trainer.max_ckpt_to_keep",
    "trainer.best_ckpt_", "trainer.async_save", "trainer.watchdog_seconds", "trainer.max_restarts",
    "trainer.timeline", "trainer.profile_steps", "trainer.rollout_dump_", "trainer.log_rollout_samples",
    "trainer.log_val_generations", "trainer.save_microbatch_steps", "trainer.save_steps_for_replay",
    "insight.", "preflight.",
)  # fmt: skip
"""Prefixes of keys that name a run or say what it writes; they do not change a number of it."""


def training_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that can change what a run computes, the seed included."""
    return {key: value for key, value in config.items() if not key.startswith(IDENTITY_KEYS)}


def training_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys of :func:`training_keys` whose values differ, with both values."""
    return differences(training_keys(first), training_keys(second))


def split_arms(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the indices of the configurations of each arm, in order of first appearance.

    If all are of one arm, each is an arm of its own: what is compared then is the noise between seeds.
    """
    arms: list[tuple[dict[str, Any], list[int]]] = []
    for index, config in enumerate(configs):
        keys = {key: value for key, value in training_keys(config).items() if key != SEED}
        members = next((members for known, members in arms if known == keys), None)
        if members is None:
            arms.append((keys, [index]))
        else:
            members.append(index)
    if len(arms) == 1:
        return [[index] for index in range(len(configs))]
    return [members for _, members in arms]
