"""Record of a sweep, and its results as rows and as a picture.

<out>/
  sweep.json     command, fixed overrides, and the values of each trial with a hash of its configuration
  000/, 001/...  run directories
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.apps.lab.compare import Run, read_whole_run, training_keys
from hone.apps.lab.confidence import ArmComparison, RunScores, compare_pair, require_scores
from hone.errors import HoneError
from hone.insight.run_directory import RunStatus
from hone.insight.run_files import RUN, jsonable, write_atomically

RECORD = "sweep.json"


@dataclass(frozen=True)
class TrialResult:
    """A trial of a sweep."""

    directory: Path
    values: Mapping[str, str]  # swept key to value
    status: str  # status of the run; ``not started`` without one
    score: float | None  # mean score; None while the run is not finished


@dataclass(frozen=True)
class SweepResult:
    """Results of a sweep."""

    score: str  # what was measured; empty if no trial is finished
    more_is_better: bool  # False for losses
    trials: Sequence[TrialResult]  # best first, then those without a score
    # the second-best finished trial against the best; None with fewer than two, or without prompts in common
    lead: ArmComparison | None


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash of the keys that can change what a run computes."""
    text = json.dumps(jsonable(training_keys(config)), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_sweep(
    out: Path, base: Mapping[str, Any], trials: Sequence[Mapping[str, str]], hashes: Sequence[str]
) -> list[Path]:
    """Store the trials in ``sweep.json``, and return the run directory of each; those of an earlier start keep theirs."""
    file = out / RECORD
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"base": dict(base), "trials": []}
    changed = [key for key in {**record["base"], **base} if record["base"].get(key) != base.get(key)]
    if changed:
        raise _other_sweep(out, f"another sweep: {', '.join(changed)} differs")
    entries = {json.dumps(entry["values"], sort_keys=True): entry for entry in record["trials"]}
    directories = []
    for values, code in zip(trials, hashes, strict=True):
        new = {"directory": f"{len(entries):03d}", "values": dict(values), "config": code}
        entry = entries.setdefault(json.dumps(values, sort_keys=True), new)
        if entry["config"] != code:
            raise _other_sweep(out, f"trial {entry['directory']} with other values of keys that are not swept")
        directories.append(out / entry["directory"])
    record["trials"] = list(entries.values())
    write_atomically(file, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return directories


def _other_sweep(out: Path, what: str) -> HoneError:
    return HoneError(
        f"the folder holds {what}",
        where=str(out),
        why="trials can be compared only if they differ in nothing but their swept keys",
        fix="--out DIR with another folder, or restore the configuration of the first start",
        code="E-runs",
    )


def read_sweep(out: Path, metric: str | None = None) -> SweepResult:
    """Read the results of a sweep; ``metric`` as for :func:`hone.apps.lab.confidence.scores_in_common`."""
    file = out / RECORD
    if not file.exists():
        raise HoneError("the folder holds no sweep", where=str(out), fix="--out DIR of a sweep", code="E-runs")
    entries = json.loads(file.read_text(encoding="utf-8"))["trials"]
    runs = {
        entry["directory"]: read_whole_run(out / entry["directory"], entry["directory"])
        for entry in entries
        if (out / entry["directory"] / RUN).exists()
    }
    finished = {name: run for name, run in runs.items() if run.status == RunStatus.FINISHED.value}
    scores = require_scores(list(finished.values()), metric) if finished else RunScores("", [], True)
    means = {name: math.fsum(v.values()) / len(v) for name, v in zip(finished, scores.values, strict=True)}
    trials = [
        TrialResult(
            out / entry["directory"],
            entry["values"],
            runs[entry["directory"]].status if entry["directory"] in runs else "not started",
            means.get(entry["directory"]),
        )
        for entry in entries
    ]
    sign = -1 if scores.more_is_better else 1
    trials.sort(key=lambda trial: _rank(trial.score, sign))
    lead = _lead(list(finished.values()), scores, [trial.directory.name for trial in trials])
    return SweepResult(scores.name, scores.more_is_better, trials, lead)


def _rank(score: float | None, sign: int) -> tuple[int, float]:
    """Return the key by which trials are sorted: finite scores, then a loss that is not a number, then trials without a score."""
    if score is None:
        return 2, 0.0
    return (1, 0.0) if math.isnan(score) else (0, sign * score)


def _lead(runs: Sequence[Run], scores: RunScores, ranking: Sequence[str]) -> ArmComparison | None:
    if len(runs) < 2:
        return None
    places = {run.name: place for place, run in enumerate(runs)}
    best, second = places[ranking[0]], places[ranking[1]]
    pair = RunScores(scores.name, [scores.values[second], scores.values[best]], scores.more_is_better)
    return compare_pair(runs[second], runs[best], pair) if pair.values[0].keys() & pair.values[1].keys() else None


def draw_sweep(path: Path, result: SweepResult) -> Path:
    """Draw a PNG with one panel per swept key: the score of each trial over the value of the key."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scored = [(trial, trial.score) for trial in result.trials if trial.score is not None]
    keys = list(dict.fromkeys(key for trial, _ in scored for key in trial.values))
    columns = min(3, max(1, len(keys)))
    rows = max(1, math.ceil(len(keys) / columns))
    figure = Figure(figsize=(4.6 * columns, 3.4 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for number, key in enumerate(keys, 1):
        axes = figure.add_subplot(rows, columns, number)
        points = [(trial.values[key], score) for trial, score in scored if key in trial.values]
        numbers = [_number(value) for value, _ in points]
        if all(value is not None for value in numbers):
            positions = [float(value) for value in numbers if value is not None]
            if min(positions) > 0 and max(positions) >= 20 * min(positions):
                axes.set_xscale("log")
        else:
            names = list(dict.fromkeys(value for value, _ in points))
            positions = [float(names.index(value)) for value, _ in points]
            axes.set_xticks(range(len(names)), names)
        axes.scatter(positions, [score for _, score in points], s=22)
        axes.set_title(key, fontsize=9, loc="left")
        axes.set_ylabel(result.score, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
