"""Tracker protocol, registry, and the composite that a trainer uses.

``metrics.jsonl`` is the record of the run: it is always written, first, and the run stops if that fails. The other trackers
show the same numbers elsewhere; their failures never end the run.

Besides metrics trackers show sampled rollouts of a step (:class:`NewRollouts`), and the picture of the curves (:func:`draw_curves`).
"""

from __future__ import annotations

import importlib
import json
import logging
import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import yaml

from hone.errors import ConfigError, HoneError
from hone.extras import install_command
from hone.insight.archive.read import Archive, open_archive, table_records
from hone.insight.redaction import redact_credentials, redact_tree
from hone.insight.run_directory import RunDirectory
from hone.insight.run_files import read_metrics
from hone.progress import Bar, Saying
from hone.registry import Registry

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receiver of the metrics of one run, and of what else its service can show; the default ignores the rest."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive metrics of a step. Steps do not decrease; a validation that ends after its step has a call of its own."""

    def rollouts(self, rollouts: Rollouts) -> None:
        """Receive sampled rollouts of a step; the step may be earlier than the last one that was logged."""

    def alert(self, step: int, alert: Mapping[str, Any]) -> None:
        """Receive an alert of a detector, as ``alerts.jsonl`` has it."""

    def picture(self, file: Path) -> None:
        """Receive the curves of the run as a PNG, before the end; the file is removed afterwards."""

    def progress(self, what: str, total: int) -> Bar:
        """Show the progress of a loop within or before a step."""
        return Saying(what, total, lambda text: None)

    @abstractmethod
    def finish(self, status: str) -> None:
        """Flush and close; ``status`` is ``finished``, ``interrupted`` or ``failed``."""


@dataclass(frozen=True)
class RunInfo:
    """Description of the run for the constructor of a tracker."""

    run_dir: RunDirectory
    project: str
    experiment: str
    config_yaml: str
    total_steps: int
    first_step: int = 0  # of the checkpoint that the run resumes from

    def config(self) -> dict[str, Any]:
        return redact_tree(yaml.safe_load(self.config_yaml) or {})


SAMPLES = 8  # sequences of a step that trackers show by default

TRACKERS: Registry[Callable[[RunInfo], Tracker]] = Registry("tracker", key="trainer.logger")
"""Tracker factories by the name that trainer.logger lists."""


def build_trackers(
    names: Sequence[str],
    *,
    run_dir: RunDirectory | Path,
    project: str,
    experiment: str,
    config_yaml: str,
    total_steps: int,
    first_step: int = 0,
    samples: int | None = SAMPLES,
) -> CompositeTracker:
    """Build the trackers called ``names``, plus the one of ``metrics.jsonl``.

    On resume, rewind the run directory first: trackers continue from its last step. ``samples``: sequences of a step
    that trackers show; None for all in the archive.

    Raises ConfigError: a tracker does not exist, its package is not installed, or it cannot start.
    """
    directory = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(run_dir)
    info = RunInfo(directory, project, experiment, config_yaml, total_steps, first_step)
    factories = {
        name: TRACKERS.get(name) for name in dict.fromkeys(names)
    }  # unknown names raise before any tracker starts
    record = TRACKERS.get("jsonl")(info)
    others = {name: _start(name, factory, info) for name, factory in factories.items() if name != "jsonl"}
    return CompositeTracker(record, others, info, samples)


def _start(name: str, factory: Callable[[RunInfo], Tracker], info: RunInfo) -> Tracker:
    try:
        return factory(info)
    except HoneError:
        raise
    except Exception as error:  # any error of a third party: no network, no login, no server
        raise ConfigError(
            f"tracker '{name}' cannot start ({type(error).__name__}: {error})",
            where="trainer.logger",
            fix=f"fix this, or leave '{name}' out of trainer.logger (wandb: WANDB_MODE=offline needs no network)",
        ) from error


class CompositeTracker:
    """Composite of all trackers; errors of the run's record propagate, those of other trackers do not.

    The latter are counted, the first of each tracker is logged with its traceback, and the counts are logged at the end.

    Args:
        info: the run, whose rollouts and curves are shown; None shows metrics and alerts alone.
        samples: sequences of a step that are shown; None for all in the archive.

    Attributes:
        errors: failed calls by tracker name.
    """

    def __init__(
        self, record: Tracker, others: Mapping[str, Tracker], info: RunInfo | None = None, samples: int | None = SAMPLES
    ) -> None:
        self._record, self._trackers, self._info = record, dict(others), info
        self.errors: Counter[str] = Counter()
        self._finished = False
        self._new = NewRollouts(info.run_dir, samples) if info and self._showing("rollouts") else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step to all trackers, and the rollouts that the run has written since the last call."""
        self._record.log(step, metrics)
        for name, tracker in self._trackers.items():
            self._guarded(name, tracker.log, step, metrics)
        self._show_rollouts()

    def alerts(self, step: int, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Show alerts of detectors, as ``alerts.jsonl`` has them; credentials in their texts are hidden."""
        for alert in alerts:
            shown = {key: redact_credentials(text) if isinstance(text, str) else text for key, text in alert.items()}
            shown["causes"] = [redact_credentials(cause) for cause in alert["causes"]]
            for name, tracker in self._showing("alert").items():
                self._guarded(name, tracker.alert, step, shown)

    def progress(self, what: str, total: int) -> Bar:
        """Show the progress of a loop in the tracker that can."""
        return next(iter(self._showing("progress").values()), self._record).progress(what, total)

    def finish(self, status: str) -> None:
        """Show the last rollouts and the curves, close all trackers, and report how many calls failed.

        A second call does nothing.
        """
        if self._finished:
            return
        self._finished = True
        self._show_rollouts()
        self._show_curves()
        for name, tracker in self._trackers.items():
            self._guarded(name, tracker.finish, status)
        self._record.finish(status)
        if self.errors:
            counts = ", ".join(f"{name}: {count}" for name, count in sorted(self.errors.items()))
            logger.warning("tracker errors: %s (metrics.jsonl is complete)", counts)

    def _showing(self, kind: str) -> dict[str, Tracker]:
        """Return the trackers whose service shows a kind of thing: those that override the method of that name."""
        overridden = {name: getattr(type(tracker), kind, None) for name, tracker in self._trackers.items()}
        return {
            name: self._trackers[name]
            for name, method in overridden.items()
            if method not in (None, getattr(Tracker, kind))
        }

    def _show_rollouts(self) -> None:
        if self._new is None:
            return
        try:
            for rollouts in self._new.take():
                for name, tracker in self._showing("rollouts").items():
                    self._guarded(name, tracker.rollouts, rollouts)
        except (HoneError, OSError) as error:  # a damaged file of the archive
            logger.warning("trackers do not show rollouts of a step: %s", error)

    def _show_curves(self) -> None:
        showing = self._showing("picture")
        if not showing or self._info is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            try:
                picture = draw_curves(self._info.run_dir, Path(folder) / "curves.png", self._info.experiment)
            except Exception:  # noqa: BLE001 - matplotlib may fail in many ways; the run must end all the same
                logger.exception("the curves cannot be drawn for the trackers")
                return
            for name, tracker in showing.items() if picture else ():
                self._guarded(name, tracker.picture, picture)

    def _guarded(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception:  # any error of a third party; counted and logged
            self.errors[name] += 1
            if self.errors[name] == 1:
                logger.exception("tracker '%s' failed; training continues, further errors are only counted", name)


def require(module: str, *, tracker: str) -> ModuleType:
    """Import the optional package of a tracker; if it is not installed, the error names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracker '{tracker}' needs a package that is not installed ({error})",
            where="trainer.logger",
            fix=f"{install_command(tracker)}, or leave '{tracker}' out of trainer.logger",
        ) from error


@TRACKERS.register("jsonl")
class JsonlTracker(Tracker):
    """Append one line per call; always on. A metric that its step has already is refused."""

    def __init__(self, info: RunInfo) -> None:
        self._run_dir = info.run_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run_dir.log_metrics(step, metrics)

    def finish(self, status: str) -> None:
        del status
        self._run_dir.close()


COLUMNS = ("step", "uid", "index", "prompt", "answer", "expected", "score", "terms", "advantage", "end")
"""Columns of a table of rollouts."""
_READ = (
    "step", "uid", "index", "part", "fate", "prompt", "messages", "text", "ground_truth", "stop_reason", "seconds",
    "score", "terms", "error", "episode", "loss_mask", "advantages",
)  # fmt: skip
_LONGEST = 1500  # characters of a cell
_CURVES = (
    "critic/rewards/mean", "train/loss", "actor/pg_loss", "actor/kl_loss", "actor/ppo_kl", "actor/entropy",
    "actor/grad_norm", "response_length/mean", "rewards/accuracies", "val/loss", "val/rewards/accuracies",
)  # fmt: skip
"""Metrics of the picture of the curves, with those of validations."""


@dataclass(frozen=True)
class Rollouts:
    """Some sequences of a step, spread evenly over the archive's file."""

    kind: str  # ``rollouts`` or ``validation``
    step: int
    records: list[dict[str, Any]]  # the sequences, as the archive has them; credentials are hidden there already
    total: int  # number of sequences in the file
    written: float  # time at which the file was written, in seconds since 1970

    def rows(self) -> list[list[Any]]:
        """Return one row per sequence with the values of :data:`COLUMNS`; long texts are cut in the middle."""
        return [_row(record) for record in self.records]


class NewRollouts:
    """Sampled rollouts of the steps whose file appears in the archive after the start of the process. ``limit``:
    largest number of sequences of a step; None for all in the file, 0 for none.
    """

    def __init__(self, directory: RunDirectory, limit: int | None) -> None:
        self._limit = limit
        archives = [open_archive(folder) for folder in (directory.rollouts, directory.validation)]
        self._read = [(archive, set(archive.steps())) for archive in archives]

    def take(self) -> Iterator[Rollouts]:
        """Yield the rollouts of every file that no earlier call gave; a file may appear after its step is logged."""
        for archive, read in self._read if self._limit != 0 else ():
            for step in archive.steps():
                if step not in read:
                    read.add(step)
                    yield read_rollouts(archive, step, self._limit)


def read_rollouts(archive: Archive, step: int, limit: int | None = None) -> Rollouts:
    """Return at most ``limit`` sequences of a step at even distances, the first included.

    Raises HoneError: the step has no file, or the file cannot be read (code E-runs).
    """
    table = archive.table(step, _READ)
    count = len(table) if limit is None else min(limit, len(table))
    chosen = table.take([number * len(table) // count for number in range(count)])
    written = (archive.folder / f"step_{step}.parquet").stat().st_mtime
    return Rollouts(archive.folder.name, step, list(table_records(chosen)), len(table), written)


def mean_advantage(record: Mapping[str, Any]) -> float | None:
    """Return the mean advantage over the tokens that the update learned from; None if there is none."""
    advantages = record["advantages"]
    if not advantages:
        return None
    mask = record["loss_mask"] or [1] * len(advantages)
    learned = [value for value, counts in zip(advantages, mask, strict=True) if counts]
    return sum(learned) / len(learned) if learned else None


def ending(record: Mapping[str, Any]) -> str:
    return (record["episode"] or {}).get("end") or record["stop_reason"] or ""


def prompt_of(record: Mapping[str, Any]) -> str:
    """Return the prompt as text; its messages as JSON if the archive has no text."""
    if record["prompt"] is not None:
        return record["prompt"]
    return json.dumps(record["messages"], ensure_ascii=False) if record["messages"] else ""


def shortened(text: str, longest: int = _LONGEST) -> str:
    """Return a text, cut in the middle if it has more than ``longest`` characters.

    >>> shortened("abcdefghij", 4)
    'ab ... ij'
    """
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def _row(record: Mapping[str, Any]) -> list[Any]:
    terms = ", ".join(f"{name} {value:g}" for name, value in (record["terms"] or {}).items())
    expected = record["ground_truth"]
    expected = expected if isinstance(expected, str) else "" if expected is None else json.dumps(expected)
    texts = [shortened(text) for text in (prompt_of(record), record["text"], expected)]
    identity = [record["step"], record["uid"], record["index"]]
    return [*identity, *texts, record["score"], terms, mean_advantage(record), ending(record)]


def draw_curves(directory: RunDirectory, file: Path, title: str) -> Path | None:
    """Draw the main curves of a run as a PNG; None if no metric has two steps."""
    from hone.insight.curves import draw_png, points  # a step needs none of it

    metrics = read_metrics(directory.path)
    validations = sorted({name for row in metrics for name in row if name.startswith("val-core/")})
    curves = {name: points(metrics, name) for name in (*_CURVES, *validations)}
    panels = {name: {title: curve} for name, curve in curves.items() if len(curve) > 1}
    return draw_png(file, panels, title=title) if panels else None
