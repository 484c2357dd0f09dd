"""Finding runs, summing them up, and telling them apart."""

from __future__ import annotations

import datetime
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hone.errors import HoneError, did_you_mean
from hone.insight.curves import points
from hone.insight.run_files import CONFIG, RUN, read_metrics, read_run

ABSENT = "(absent)"
_DEPTH = 4  # folders below the root in which runs are looked for
_MORE_IS_BETTER = ("val-core/", "val-aux/", "critic/rewards/", "critic/score/", "reward/", "perf/throughput")
_LESS_IS_BETTER = (
    *(
        "train/loss",
        "val/loss",
        "critic/vf_loss",
        "reward/error_rate",
        "reward/timeout_rate",
        "val-aux/reward/error_rate",
    ),
    *("reward/zero_std_group_ratio", "timing_s/", "perf/time_per_step"),
)


@dataclass(frozen=True)
class Run:
    """A run read from its directory.

    Attributes:
        name: its path below the root.
        path: its directory.
        record: ``run.json``.
        metrics: rows of ``metrics.jsonl``.
        config: ``config.yaml``, flat: dotted key to value.
    """

    name: str
    path: Path
    record: Mapping[str, Any]
    metrics: Sequence[Mapping[str, float]]
    config: Mapping[str, Any]

    @property
    def status(self) -> str:
        """As recorded; ``dead`` when the record says ``running`` but its process, of this machine, is gone."""
        status = str(self.record.get("status", "unknown"))
        here = self.record.get("host") == platform.node()
        return "dead" if status == "running" and here and not _alive(self.record.get("pid")) else status

    @property
    def steps(self) -> int:
        """Step of the last metrics."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def seconds(self) -> float | None:
        """From the first start to the end, or until now for a live run; None when unknown."""
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
        """All metrics of the run, sorted."""
        return sorted({name for row in self.metrics for name in row} - {"step"})

    def last(self, metric: str) -> float | None:
        """The latest value of a metric, None when it has none."""
        curve = points(self.metrics, metric)
        return curve[-1][1] if curve else None


def _alive(pid: Any) -> bool:
    """Whether the process may still run; a process of another user counts as running."""
    if not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_whole_run(path: Path, name: str = "") -> Run:
    """Read a run directory.

    Raises:
        HoneError: a file of it is damaged.
    """
    config = path / CONFIG
    try:
        tree = yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else {}
    except yaml.YAMLError as error:
        raise HoneError(f"not YAML: {error}", where=str(config), fix="restore the file") from None
    return Run(name or path.name, path, read_run(path), read_metrics(path), dict(flatten(tree)))


def run_names(root: Path) -> dict[str, Path]:
    """Every run below ``root``, by its path relative to it, oldest first."""

    def search(folder: Path, depth: int) -> Iterator[Path]:
        if (folder / RUN).is_file():
            yield folder
        elif depth:
            for child in sorted(folder.iterdir()):
                if child.is_dir() and not child.name.startswith("."):
                    yield from search(child, depth - 1)

    found = list(search(root, _DEPTH)) if root.is_dir() else []
    found.sort(key=lambda folder: ((folder / RUN).stat().st_ctime, str(folder)))
    return {folder.relative_to(root).as_posix() if folder != root else folder.name: folder for folder in found}


def find_run(wanted: str, root: Path) -> Run:
    """Find a run by its directory, its name below ``root`` (``project/experiment``), or the last part of that name.

    Raises:
        HoneError: there is none, or the short name fits several; the message lists names.
    """
    if (Path(wanted) / RUN).is_file():
        return read_whole_run(Path(wanted), wanted.rstrip("/"))
    known = run_names(root)
    if wanted in known:
        return read_whole_run(known[wanted], wanted)
    fitting = [name for name in known if name.rsplit("/", 1)[-1] == wanted]
    if len(fitting) == 1:
        return read_whole_run(known[fitting[0]], fitting[0])
    if fitting:
        raise HoneError(
            f"'{wanted}' is the name of {len(fitting)} runs", fix=f"name one of {', '.join(fitting)}", code="E-runs"
        )
    near = did_you_mean(wanted, [*known, *(name.rsplit("/", 1)[-1] for name in known)]) if known else ""
    raise HoneError(
        f"no run '{wanted}' under '{root}' ({len(known)} runs there)",
        fix=near or "name a run directory, or the folder that holds them with --root",
        code="E-runs",
    )


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested mapping as dotted keys; lists are leaves."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, tree


def config_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Keys whose values differ among the runs, each with one value a run (``(absent)`` where a run lacks the key)."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = {key: [run.config.get(key, ABSENT) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


@dataclass(frozen=True)
class Summary:
    """One metric of one run.

    Attributes:
        count: how many steps have it.
        first: first value.
        last: latest value.
        best: largest, or smallest where less is better (losses, error rates, times); None where neither is, as for KL.
        best_step: the first step with it.
    """

    count: int
    first: float
    last: float
    best: float | None
    best_step: int | None


def summarise(run: Run, metric: str) -> Summary | None:
    """First, last and best value of a metric; None when the run has none."""
    curve = points(run.metrics, metric)
    if not curve:
        return None
    finite = [(step, value) for step, value in curve if math.isfinite(value)] or curve
    best: tuple[float | None, float | None] = (None, None)
    if metric.startswith(_LESS_IS_BETTER):
        best = min(finite, key=lambda point: point[1])
    elif metric.startswith(_MORE_IS_BETTER):
        best = max(finite, key=lambda point: point[1])
    return Summary(len(curve), curve[0][1], curve[-1][1], best[1], None if best[0] is None else int(best[0]))


def headline_metrics(runs: Sequence[Run]) -> list[str]:
    """The metrics worth showing first that any of the runs has: validation, reward, loss, KL, length, entropy."""
    have = dict.fromkeys(name for run in runs for name in run.names())
    wanted = [name for name in have if name.startswith("val-core/")]
    fixed = (
        *("critic/rewards/mean", "train/loss", "val/loss", "actor/kl_loss", "actor/ppo_kl", "actor/entropy"),
        *("actor/grad_norm", "response_length/mean", "perf/throughput"),
    )
    return wanted + [name for name in fixed if name in have]


def require_metrics(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Check that every metric asked for is in one of the runs.

    Raises:
        HoneError: the message names the nearest metrics.
    """
    have = sorted({name for run in runs for name in run.names()})
    for name in names:
        if name not in have:
            raise HoneError(
                f"no metric '{name}' in {', '.join(run.name for run in runs)}",
                fix=did_you_mean(name, have),
                code="E-runs",
            )
    return list(names)
